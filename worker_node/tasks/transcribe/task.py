"""The registration of the task, its options, and the messages between the edge process and an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
from annotated_types import Ge, Gt, Le, Lt

from worker_node.core.types import NOT_MEASURED, Busy, Device
from worker_node.engines.options import NpuOptions, Option, Options, declare
from worker_node.engines.protocol import Outcome
from worker_node.registry import Task

KIND = "transcription"

RATE = 16_000
SAMPLE_BYTES = 2
# The encoder has a position for each 20 ms of audio: so many for a window of 30 s, in which requests are counted.
SAMPLES_PER_POSITION = 320
POSITIONS = 1500
# Silero's network for voice activity, as its package has it. It is installed as a model, but takes no requests.
VOICE_MODEL, VOICE_KIND, VOICE_FILE = "silero-vad", "voice-activity", "silero_vad_16k_sequence.onnx"


@declare
@dataclass(frozen=True, kw_only=True)
class AudioOptions(Options):
    """Bounds of one upload, and whether silence is skipped: see `audio.speech_regions`."""

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
    word_timestamps: Annotated[
        bool | None,
        Option(
            "give the times of words where a request asks for them; makes each window on the NPU slower",
            default="`true`, `false` on the NPU",
        ),
    ] = None


class TranscribeJob(msgspec.Struct, frozen=True, tag="transcribe", array_like=True):
    """Write down the speech in `samples`, mono 16-bit PCM of 16 kHz, at most 30 s.

    `language` is a code such as "en", None to detect it; `translate` asks for English. `segments` and `words` ask for
    times. `prompt` is the text before this window, or names to expect.
    """

    id: int
    samples: bytes
    deadline: float
    language: str | None = None
    translate: bool = False
    segments: bool = False
    words: bool = False
    prompt: str = ""
    temperature: float = 0.0
    interactive: bool = True

    @property
    def prompt_tokens(self) -> int:
        """The job's size for its queue: encoder positions."""
        return len(self.samples) // (SAMPLE_BYTES * SAMPLES_PER_POSITION) or 1

    @property
    def ends(self) -> float:
        return self.deadline

    def timeless(self) -> TranscribeJob:
        return msgspec.structs.replace(self, id=0, deadline=0.0, interactive=True)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Text with the seconds in its window at which it begins and ends."""

    begin: float
    end: float
    text: str


class Transcript(Outcome, frozen=True, array_like=True):
    """What was said in one window, with its times as far as they were asked for; see `serving.run.SingleResult`.

    `tokens` counts what was generated. The window's encoder positions were computed in `measured_s` seconds.
    """

    id: int
    text: str
    started: float
    inference_s: float
    language: str | None = None
    segments: tuple[Span, ...] = ()
    words: tuple[Span, ...] = ()
    tokens: int = 0
    busy: Busy = NOT_MEASURED
    measured_tokens: int = 0
    measured_s: float = 0.0

    @property
    def last(self) -> bool:
        return True


TASK = Task(
    kind=KIND,
    verb="transcribe",
    capability="transcription",
    options=(__name__,),
    serving="worker_node.tasks.transcribe.building:TRANSCRIBE",
    api="worker_node.tasks.transcribe.http:API",
    files="worker_node.tasks.transcribe.building:FILES",
)
