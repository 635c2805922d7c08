"""The messages between the edge process and an engine for speech recognition: one window of audio a job."""

from __future__ import annotations

import msgspec

from worker_node.core.types import NOT_MEASURED, Busy
from worker_node.engines.protocol import Outcome

SAMPLE_BYTES = 2
# The encoder has a position for each 20 ms of audio.
SAMPLES_PER_POSITION = 320


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
        """Always: a window has one result."""
        return True
