"""What a preparation process calls: PyAV is imported there, and only when audio comes."""

from __future__ import annotations


def decode(source: str, target: str, max_seconds: float) -> float:
    """See `audio.decode_audio`."""
    from worker_node.tasks.transcribe.audio import decode_audio  # noqa: PLC0415

    return decode_audio(source, target, max_seconds)
