"""The canary of speech engines: a sentence that they must understand."""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import aclosing
from functools import cache
from importlib import resources
from pathlib import Path

from worker_node.core.errors import ConfigurationError
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import Engine
from worker_node.models.manifest import InstalledModel
from worker_node.tasks.transcribe.messages import Heard, TranscribeJob

# Three seconds of a LibriVox reading of "Sense and Sensibility" (public domain): "He might even have been made amiable
# himself." A small model may mishear a word; an engine that answers garbage has none of them.
_WORDS = ("might", "even", "have", "been", "made", "himself")
_ENOUGH = 5


@cache
def canary_samples() -> bytes:
    """The sentence as 16-bit PCM. Raises ConfigurationError when PyAV is not installed."""
    try:
        from worker_node.tasks.transcribe.audio import decode_audio  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "speech recognition decodes audio with PyAV, which is not installed: pip install 'npu-node[speech]'"
        ) from error
    source = resources.files("worker_node.tasks.transcribe").joinpath("canary.ogg")
    with resources.as_file(source) as path, tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "canary.pcm"
        decode_audio(str(path), str(target), 10.0)
        return target.read_bytes()


def speech_canary(installed: InstalledModel) -> Canary:
    """Return the canary of one model. Raises ConfigurationError when PyAV is not installed."""
    samples = canary_samples()

    async def examine(engine: Engine) -> None:
        job = TranscribeJob(0, samples, time.monotonic() + CANARY_TIMEOUT_S, language="en")
        async with aclosing(engine.run(job, Heard)) as results:
            text = (await anext(results)).text
        words = set(re.findall(r"[a-z]+", text.lower()))
        found = sum(word in words for word in _WORDS)
        if found < _ENOUGH:
            raise CanaryFailed(
                f"{installed.id} understood {found} of {len(_WORDS)} words of a sentence; {_ENOUGH} are right"
            )

    return examine
