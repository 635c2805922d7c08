"""Transcribe: decode an upload, cut it into windows, run each on an engine, and join the texts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import UnsupportedParameter
from worker_node.core.types import NOT_MEASURED, NOTHING, Busy, Feature, RequestContext, Route, Timing, Usage
from worker_node.manager.manager import ModelManager
from worker_node.observability.tracing import Operation
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.scheduling.admission import TokenCost
from worker_node.serving.routing import Demand, reject_if_full, select_placement
from worker_node.serving.run import Services, SingleRun, run_selected
from worker_node.tasks.transcribe.audio import Window, decode_audio, find_speech, next_window, read_samples
from worker_node.tasks.transcribe.building import TranscriptionModel, find_network
from worker_node.tasks.transcribe.task import (
    KIND,
    RATE,
    SAMPLE_BYTES,
    SAMPLES_PER_POSITION,
    VOICE_MODEL,
    AudioOptions,
    Span,
    TranscribeJob,
    Transcript,
)

# FFmpeg decodes an hour of MP3 in two seconds, and an hour is looked through for speech in five; what takes longer than
# this is not worth it.
_LIMITS = PreparationLimits(processes=2, cpu_s=60.0, wall_s=120.0, memory_bytes=2 * 2**30, queue=16)
_FILE = "file"


@dataclass(frozen=True, slots=True)
class VoiceChoice:
    """What a request says of silence, in the field `param`; what is None is left to the model's options.

    `insist`: the request is refused where this node cannot skip silence.
    """

    wanted: bool | None = None
    threshold: float | None = None
    silence_ms: int | None = None
    padding_ms: int | None = None
    param: str | None = None
    insist: bool = True


class Voice(NamedTuple):
    """How to find speech: `network` is the file of Silero's network; for the rules see `audio.speech_regions`."""

    network: str
    threshold: float = 0.5
    silence_ms: int = 500
    padding_ms: int = 300


async def find_voice(manager: ModelManager, limits: AudioOptions, choice: VoiceChoice, deadline: float) -> Voice | None:
    """How a request has silence skipped, None if it has not. Raises UnsupportedParameter where it cannot be."""
    if not (limits.vad if choice.wanted is None else choice.wanted):
        return None
    network = await manager.query_store(find_network, deadline)
    if network is None:
        if choice.wanted and not choice.insist:
            return None
        raise UnsupportedParameter(
            f"{choice.param or 'vad'}: voice activity cannot be detected, {VOICE_MODEL} is not installed on this node; "
            f"its operator can run: npu-node pull {VOICE_MODEL}",
            param=choice.param,
        )

    return Voice(
        str(network),
        limits.vad_threshold if choice.threshold is None else choice.threshold,
        limits.vad_silence_ms if choice.silence_ms is None else choice.silence_ms,
        limits.vad_padding_ms if choice.padding_ms is None else choice.padding_ms,
    )


class AudioDecoder:
    """Processes that decode and that look for speech, each started when the first file needs it.

    Two of each kind: beside a recording of hours there is one for a clip.
    """

    def __init__(self) -> None:
        self._decoding = PreparationPool(_LIMITS, ("av", decode_audio.__module__))
        self._listening = PreparationPool(_LIMITS, ("openvino", find_speech.__module__))

    async def decode(self, source: Path, target: Path, most_seconds: float, deadline: float) -> float:
        """Write mono PCM of 16 kHz to `target`; returns its seconds. Raises as `PreparationPool.run`."""
        arguments = (str(source), str(target), most_seconds)
        return float(await self._decoding.run(decode_audio, *arguments, deadline=deadline, param=_FILE))

    async def find_speech(self, pcm: Path, voice: Voice, deadline: float) -> list[Window]:
        """Where there is speech in what `decode` wrote, in order; raises as `decode`."""
        found = await self._listening.run(find_speech, str(pcm), *voice, deadline=deadline, param=_FILE)
        return [Window(begin, end) for begin, end in found]

    async def close(self) -> None:
        await asyncio.gather(self._decoding.close(), self._listening.close())


class SpeechMetrics:
    unit = "seconds of audio"

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, labelnames=("model", "device"), registry=registry)
        self.made = self.heard = counter("npu_node_audio_seconds", "Seconds of audio given to speech models")
        self.skipped = counter(
            "npu_node_audio_skipped_seconds", "Seconds of audio left out because they hold no speech"
        )


async def find_model(
    services: Services, name: str | None, wanted: TranscribeJob, context: RequestContext
) -> TranscriptionModel:
    """The model of a request, which is refused here, before its audio is decoded, if it cannot be served."""
    model = await services.manager.model_of(KIND, TranscriptionModel, name, context.deadline)
    if not model.multilingual:
        if wanted.translate:
            raise UnsupportedParameter(f"{model.id} knows English only; it does not translate", param="model")
        if wanted.language not in {None, "en"}:
            raise UnsupportedParameter(
                f"{model.id} knows English only: language must be en or left out", param="language"
            )
    elif wanted.language is not None and wanted.language not in model.languages:
        known = ", ".join(sorted(model.languages))
        raise UnsupportedParameter(f"language must be one of {known}", param="language")

    reject_if_full(model.placements, 1, context)
    return model


@asynccontextmanager
async def transcribe(
    services: Services,
    model: TranscriptionModel,
    context: RequestContext,
    wanted: TranscribeJob,
    voice: Voice | None,
    upload: Path,
    scratch: Path,
) -> AsyncIterator[Transcription]:
    """Transcribe a file as `wanted`, for as long as the block lasts; the first window is done when it begins.

    With a `voice`, the model gets only what that takes for speech. Raises BadRequest (no audio, or too long), and what
    `run_selected` raises; while iterating, too.
    """
    decoder = services.parts.of(AudioDecoder)
    with services.tracing.operation("transcribe", {}) as operation:
        began = time.monotonic()
        with model.activity.working():
            pcm = scratch / "audio.pcm"
            most = 60.0 * model.limits.max_audio_minutes
            seconds = await decoder.decode(upload, pcm, most, context.deadline)
            whole = Window(0, round(seconds * RATE))
            regions = [whole] if voice is None else await decoder.find_speech(pcm, voice, context.deadline)
            operation.begin("route")
            run = Transcription(services, model, context, wanted, pcm, seconds, deque(regions), began, operation)
            await run.begin()
            yield run
            if not run.complete:  # a streamed reply has reported the error itself, or its reader has left
                return
            usage = Usage(max(1, round(run.heard_s * RATE) // SAMPLES_PER_POSITION), run.tokens)
            operation.answered(usage, busy=run.busy)
            timing = replace(run.timing, total=(time.monotonic() - context.arrived) * 1e3)
            services.telemetry.finished(run.route, usage, timing, busy=run.busy)
            own, labels = services.telemetry.own(SpeechMetrics), (run.route.model, run.route.device)
            own.heard.labels(*labels).inc(run.heard_s)
            own.skipped.labels(*labels).inc(max(0.0, seconds - run.heard_s))


@dataclass(eq=False)
class Transcription:
    """A transcription that runs: `parts` come window by window, and what is known of all of it grows with them.

    The windows are those of the whole recording, or of its regions of speech. Each is transcribed alone, with the
    caller's prompt: after the text of an earlier window, a small model gives no times. `complete`: all parts were
    taken.
    """

    route: Route = field(init=False)
    timing: Timing = field(init=False)

    services: Services
    model: TranscriptionModel
    context: RequestContext
    wanted: TranscribeJob
    pcm: Path
    seconds: float
    regions: deque[Window]
    began: float
    operation: Operation

    language: str | None = None
    tokens: int = 0
    busy: Busy = NOT_MEASURED
    heard_s: float = 0.0
    complete: bool = False
    _first: Transcript | None = None
    _answered: bool = False

    async def begin(self) -> None:
        """Do the first window with speech, which decides device and language."""
        self._first = await self._next()
        if self._answered:
            return
        if self.context.require_device is not None:
            # The required device must have run something to prove it.
            await self._ask(bytes(SAMPLE_BYTES * RATE))
        else:
            selection = await select_placement(self._demand(self.wanted), self.context)
            self.operation.routed(selection.route)
            self.language = self.wanted.language
            self.route, self.timing = selection.route, Timing(0.0, (time.monotonic() - self.began) * 1e3, 0.0, 0.0)

    async def parts(self) -> AsyncIterator[Transcript]:
        part = self._first
        try:
            while part is not None:
                yield part
                part = await self._next()
        except Exception as error:
            # A reply that streams renders the error itself, inside of the block of the operation.
            self.operation.failed(error)
            raise
        self.complete = True

    async def _next(self) -> Transcript | None:
        """The next window with speech; None when the audio is over."""
        while (window := await asyncio.to_thread(next_window, self.pcm, self.regions)) is not None:
            samples = await asyncio.to_thread(read_samples, self.pcm, window)
            if not _silent(samples):
                self.heard_s += window.seconds
                return _spoken(window, await self._ask(samples.tobytes()))
        return None

    def _demand(self, job: TranscribeJob) -> Demand:
        model = self.model
        needs: frozenset[Feature] = NOTHING
        if model.multilingual and self.wanted.language is None:
            needs = needs | {"language_detection"}
        if self.wanted.words:
            needs = needs | {"word_timestamps"}

        # The head of the reply may be out, and names the device of the first window.
        require = self.route.device if self._answered else self.context.require_device
        size = job.prompt_tokens
        return Demand(model.id, model.placements, size, size, require=require, needs=needs)

    async def _ask(self, samples: bytes) -> Transcript:
        context = self.context
        job = msgspec.structs.replace(self.wanted, samples=samples, language=self.wanted.language or self.language)
        demand = self._demand(job)
        prepared = time.monotonic()
        run = SingleRun(
            demand, context, job, Transcript, 1, lambda _limits: TokenCost(job.prompt_tokens), self.began, prepared
        )
        selection = await select_placement(demand, context)
        if not self._answered:
            self.operation.routed(selection.route)
        answer = await run_selected(self.services, run, selection, self.operation)
        if self._answered:
            self.timing = replace(self.timing, inference=self.timing.inference + answer.timing.inference)
            self.busy = self.busy.plus(answer.result.busy)
        else:
            self.route, self.timing, self.busy = answer.route, answer.timing, answer.result.busy
            self.language = self.wanted.language or answer.result.language
            self._answered = True

        self.tokens += answer.result.tokens
        return answer.result


# A window whose loudest tenth of a second stays below this (of 32,768, −84 dB) has no sound: no more than the noise of
# rounding to 16 bits. Models invent words for it.
_SILENCE = 2.0


def _silent(samples: np.ndarray[tuple[int, ...], np.dtype[np.int16]]) -> bool:
    frame = RATE // 10
    whole = samples[: max(frame, len(samples) // frame * frame)].astype(np.float32)
    frames = whole.reshape(-1, frame) if len(whole) % frame == 0 and len(whole) else whole[None]
    return bool(np.sqrt((frames**2).mean(axis=1)).max() < _SILENCE)


def _spoken(window: Window, transcript: Transcript) -> Transcript:
    """What was said in one window; times count from the beginning of the audio."""

    def moved(span: Span) -> Span:
        # A model hears 30 s, whatever the window has, and may name times after its end.
        begin, end = (window.begin / RATE + min(time, window.seconds) for time in (span.begin, span.end))
        return Span(begin, end, span.text)

    segments, words = tuple(map(moved, transcript.segments)), tuple(map(moved, transcript.words))
    return msgspec.structs.replace(transcript, segments=segments, words=words)
