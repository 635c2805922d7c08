"""Human speech with its text (tests/data/speech), and how far a transcript is from it."""

import functools
import io
import re
import tempfile
import wave
from pathlib import Path

import numpy as np

_ROOT = Path(__file__).parents[1] / "data" / "speech"
_LINE = re.compile(r"^ {4}(\w+\.ogg): (.*)$", re.MULTILINE)
SPEECH = {_ROOT / name: text for name, text in _LINE.findall((_ROOT / "README.md").read_text(encoding="utf-8"))}


@functools.cache
def pcm(file):
    from worker_node.tasks.transcribe.audio import decode_audio

    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "pcm"
        decode_audio(str(file), str(target), 60.0)
        return np.fromfile(target, dtype="<i2")


def wav(samples, *, channels=1, rate=16_000):
    """A WAV file of 16-bit samples."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(np.asarray(samples).astype("<i2").tobytes())
    return target.getvalue()


def reference_words(text):
    """Words as they are compared: lower case, without punctuation, "Mr." spoken out."""
    spoken = re.sub(r"\bmr\b\.?", "mister", text.lower().replace("-", " "))
    return re.findall(r"[a-z']+", spoken)


def word_errors(heard, text):
    ours, theirs = reference_words(heard), reference_words(text)
    row = list(range(len(theirs) + 1))
    for i, mine in enumerate(ours, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(theirs, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (mine != right))
    return row[-1]
