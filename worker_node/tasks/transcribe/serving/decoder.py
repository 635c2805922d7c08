"""The process that decodes uploads and finds speech in them."""

from __future__ import annotations

from pathlib import Path

from worker_node.preparation.pool import PreparationLimits, PreparationPool
from worker_node.settings import NodeSettings
from worker_node.tasks.transcribe import decoding
from worker_node.tasks.transcribe.serving.voice import Voice
from worker_node.tasks.transcribe.windows import Window

# FFmpeg decodes an hour of MP3 in two seconds, and an hour is looked through for speech in six; what takes longer than
# this is not worth it.
_LIMITS = PreparationLimits(cpu_s=60.0, wall_s=120.0, memory_bytes=2 * 2**30, queue=16)
_MODULES = ("worker_node.tasks.transcribe.decoding",)
_FILE = "file"


class AudioDecoder:
    """Started when the first upload comes."""

    def __init__(self, pool: PreparationPool | None = None) -> None:
        self._pool = pool or PreparationPool(_LIMITS, _MODULES)

    async def decode(self, source: Path, target: Path, most_seconds: float, deadline: float) -> float:
        """Write mono PCM of 16 kHz to `target`; returns its seconds.

        Raises BadRequest, Overloaded, DeadlineExceeded, EngineUnavailable.
        """
        decoded = await self._pool.run(
            decoding.decode, str(source), str(target), most_seconds, deadline=deadline, param=_FILE
        )
        return float(decoded)

    async def find_speech(self, pcm: Path, voice: Voice, deadline: float) -> list[Window]:
        """Where somebody speaks in what `decode` wrote, in order; raises as `decode`."""
        rules = voice.rules
        found = await self._pool.run(
            decoding.find_speech,
            *(str(pcm), str(voice.network), rules.threshold, rules.silence_ms, rules.padding_ms),
            deadline=deadline,
            param=_FILE,
        )
        return [Window(begin, end) for begin, end in found]

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()


def audio_decoder(_settings: NodeSettings) -> AudioDecoder:
    """The decoder of a node."""
    return AudioDecoder()
