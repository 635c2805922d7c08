"""Options of speech recognition: what requests may send, and how the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from worker_node.core.types import Device
from worker_node.engines.options import NpuOptions, Option, Options, declare
from worker_node.tasks.transcribe.task import KIND


@declare
@dataclass(frozen=True, kw_only=True)
class AudioOptions(Options):
    """Bounds of one upload, and whether silence is skipped: see `voice.VoiceRules`."""

    title: ClassVar[str] = "Speech recognition"
    task: ClassVar[str] = KIND

    max_audio_mb: Annotated[int, Gt(0), Option("megabytes of an uploaded file")] = 200
    max_audio_minutes: Annotated[int, Gt(0), Option("minutes of audio in an uploaded file")] = 240
    vad: Annotated[
        bool, Option("skip what is not speech where a request does not say; needs `npu-node pull silero-vad`")
    ] = False
    vad_threshold: Annotated[float, Gt(0), Lt(1), Option("probability from which sound counts as speech")] = 0.5
    vad_silence_ms: Annotated[int, Ge(0), Le(60_000), Option("milliseconds of silence that end a region of speech")] = (
        500
    )
    vad_padding_ms: Annotated[
        int, Ge(0), Le(5_000), Option("milliseconds kept before and after each region of speech")
    ] = 300


@declare
@dataclass(frozen=True, kw_only=True)
class TranscribeOptions(NpuOptions):
    title: ClassVar[str] = "Speech recognition on any device: one window of 30 s at a time"
    task: ClassVar[str] = KIND
    devices: ClassVar[frozenset[Device]] = frozenset(Device)
    runner: ClassVar[str] = "worker_node.tasks.transcribe.engine:TranscribeRunner"

    engine: Literal["transcription"] = "transcription"
    precision: Annotated[
        str | None, Option("OpenVINO's inference precision, for example f32 or bf16", default="the device's own")
    ] = None
