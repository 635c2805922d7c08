"""What a certification asks: prompts and texts of every length in several languages, and two recordings."""

from __future__ import annotations

import io
import itertools
import tempfile
import wave
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

PASSAGES = (
    "The lighthouse stood at the end of the harbour wall, and every evening its keeper climbed the stairs with a lamp, "
    "a book and some bread. When the fog came he rang the bell each minute, so that the fishermen knew the way home. ",
    "Der Zug hielt lange an der Grenze, und alle standen am Fenster. Ein Kind fragte, warum auf beiden Seiten "
    "derselbe Schnee liege; der Schaffner lachte und gab ihm seine alte Mütze. ",
    "Le marché ouvrait avant le jour: on y vendait du pain, des pommes, des poissons encore froids, et la vieille dame "
    "au coin de la place racontait à chacun l'histoire de la fontaine. ",
    "The committee reviewed figure 7 on page 42: revenue rose from 1,204 to 1,871 units, costs fell by 12.5 %. The "
    "remaining items (a) to (f) were moved to the next meeting on 14 March. ",
    "En el valle nadie recordaba un invierno tan largo. Los pastores contaban las ovejas cada mañana y cada mañana "
    "faltaba una, hasta que llegó la primavera y volvieron todas juntas. ",
    "def area(shapes):\n    total = 0.0\n    for shape in shapes:\n        total += shape.width * shape.height\n"
    "    return round(total, 2)\n\n",
    "山の上の小さな村では、毎年秋になると祭りがある。",
)
QUESTIONS = (
    "\nThe next sentence is:",
    "\nIn one word, the subject is",
    "\nOnce upon a time",
    "\nSummary:",
)
RANKED = (
    ("Who keeps the lamp of the harbour burning?", 0),
    ("Warum hielt der Zug?", 1),
    ("What happened to revenue and costs?", 3),
    ("How is the area of rectangles added up?", 5),
)


def passage(start: int) -> str:
    """Text without end, as far as anybody needs, which begins with another passage for each `start`."""
    return "".join(itertools.islice(itertools.cycle(PASSAGES), start % len(PASSAGES), start % len(PASSAGES) + 400))


def prompt_of(
    tokens: int, index: int, tokenize: Callable[[str], list[int]], text_of: Callable[[list[int]], str]
) -> str:
    """A prompt of about that many tokens; a pair of (tokens, index) always gives the same one."""
    question = QUESTIONS[index % len(QUESTIONS)]
    room = max(1, tokens - len(tokenize(question)))
    return text_of(tokenize(passage(index)[: room * 8])[:room]) + question


def growing(most: int, count: int) -> list[int]:
    """Up to `count` lengths from 16 to `most`, each about the same multiple of the one before."""
    return sorted({round(length) for length in np.geomspace(min(16, most), most, count)})


def texts(count: int, tokens: int) -> Iterator[str]:
    """Texts of one word up to about that many tokens, all different, in English and shorter ones in other languages."""
    whole = [text.split() for text in PASSAGES[:5]]
    for index in range(count):
        source = whole[index % len(whole)]
        words = tokens // 2 if index % len(whole) in {0, 3} else tokens // 5
        size = 1 + index * max(0, words - 8) // max(1, count - 1)
        yield f"{index}: " + " ".join(itertools.islice(itertools.cycle(source), index % 11, index % 11 + size))


def recordings() -> tuple[bytes, bytes]:
    """Two recordings (WAV, mono, 16 kHz) that say different things: the second is half of the first."""
    from worker_node.tasks.transcribe.audio import decode_audio  # noqa: PLC0415  (PyAV, for speech alone)

    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "canary.ogg", Path(directory) / "samples"
        source.write_bytes(files("worker_node.tasks.transcribe").joinpath("canary.ogg").read_bytes())
        decode_audio(str(source), str(target), 60.0)
        samples = np.frombuffer(target.read_bytes(), "<i2")
    return _wav(samples), _wav(samples[: len(samples) // 2])


def _wav(samples: npt.NDArray[np.int16]) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.astype("<i2").tobytes())
    return target.getvalue()
