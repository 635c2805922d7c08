"""The processes that decode uploads and find speech in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.settings import NodeSettings
from worker_node.tasks.transcribe import decoding
from worker_node.tasks.transcribe.serving.voice import Voice
from worker_node.tasks.transcribe.windows import Window

# FFmpeg decodes an hour of MP3 in two seconds, and an hour is looked through for speech in five; what takes longer than
# this is not worth it.
_LIMITS = PreparationLimits(cpu_s=60.0, wall_s=120.0, memory_bytes=2 * 2**30, queue=16)
_MODULES = ("worker_node.tasks.transcribe.decoding",)
_FILE = "file"


class AudioDecoder:
    """One process for each, started when the first upload needs it: nobody's decoding waits for the other."""

    def __init__(self) -> None:
        self._decoding, self._listening = (PreparationPool(_LIMITS, _MODULES) for _ in range(2))

    async def decode(self, source: Path, target: Path, most_seconds: float, deadline: float) -> float:
        """Write mono PCM of 16 kHz to `target`; returns its seconds.

        Raises BadRequest, Overloaded, DeadlineExceeded, EngineUnavailable.
        """
        decoded = await self._decoding.run(
            decoding.decode, str(source), str(target), most_seconds, deadline=deadline, param=_FILE
        )
        return float(decoded)

    async def find_speech(self, pcm: Path, voice: Voice, deadline: float) -> list[Window]:
        """Where somebody speaks in what `decode` wrote, in order; raises as `decode`."""
        rules = voice.rules
        found = await self._listening.run(
            decoding.find_speech,
            *(str(pcm), str(voice.network), rules.threshold, rules.silence_ms, rules.padding_ms),
            deadline=deadline,
            param=_FILE,
        )
        return [Window(begin, end) for begin, end in found]

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(self._decoding.close(), self._listening.close())


def audio_decoder(_settings: NodeSettings) -> AudioDecoder:
    """The decoder of a node."""
    return AudioDecoder()
