"""What a preparation process calls: PyAV and OpenVINO are imported there, and only when audio comes."""

from __future__ import annotations


def decode(source: str, target: str, max_seconds: float) -> float:
    """See `audio.decode_audio`."""
    from worker_node.tasks.transcribe.audio import decode_audio  # noqa: PLC0415

    return decode_audio(source, target, max_seconds)


def find_speech(pcm: str, network: str, threshold: float, silence_ms: int, padding_ms: int) -> list[list[int]]:
    """See `voice.network.find_speech`."""
    from worker_node.tasks.transcribe.voice import network as voice  # noqa: PLC0415
    from worker_node.tasks.transcribe.voice.regions import VoiceRules  # noqa: PLC0415

    found = voice.find_speech(pcm, network, VoiceRules(threshold, silence_ms, padding_ms))
    return [list(region) for region in found]
