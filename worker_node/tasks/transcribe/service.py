"""Transcribe: decode an upload, cut it into windows, run each on an engine, and join the texts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import UnsupportedParameter
from worker_node.core.types import NOT_MEASURED, NOTHING, Busy, Feature, RequestContext, Route, Timing, Usage
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.scheduling.admission import Work
from worker_node.serving.routing import Demand, reject_if_full, select_placement
from worker_node.serving.run import Answer, Services, SingleRun, run_selected, run_single
from worker_node.settings import NodeSettings
from worker_node.tasks.transcribe.audio import decode_audio
from worker_node.tasks.transcribe.building import TranscriptionModel, Voice, VoiceChoice
from worker_node.tasks.transcribe.messages import SAMPLE_BYTES, SAMPLES_PER_POSITION, Span, TranscribeJob, Transcript
from worker_node.tasks.transcribe.task import KIND
from worker_node.tasks.transcribe.voice import find_speech
from worker_node.tasks.transcribe.windows import RATE, Window, next_window, read_samples

# FFmpeg decodes an hour of MP3 in two seconds, and an hour is looked through for speech in five; what takes longer than
# this is not worth it.
_LIMITS = PreparationLimits(processes=2, cpu_s=60.0, wall_s=120.0, memory_bytes=2 * 2**30, queue=16)
_DECODING = ("av", "worker_node.tasks.transcribe.audio")
_LISTENING = ("openvino", "worker_node.tasks.transcribe.voice")
_FILE = "file"


class AudioDecoder:
    """Processes that decode and that look for speech, each started when the first file needs it.

    Two of each kind: beside a recording of hours there is one for a clip.
    """

    def __init__(self) -> None:
        self._decoding = PreparationPool(_LIMITS, _DECODING)
        self._listening = PreparationPool(_LIMITS, _LISTENING)

    async def decode(self, source: Path, target: Path, most_seconds: float, deadline: float) -> float:
        """Write mono PCM of 16 kHz to `target`; returns its seconds.

        Raises BadRequest, Overloaded, DeadlineExceeded, EngineUnavailable.
        """
        arguments = (str(source), str(target), most_seconds)
        return float(await self._decoding.run(decode_audio, *arguments, deadline=deadline, param=_FILE))

    async def find_speech(self, pcm: Path, voice: Voice, deadline: float) -> list[Window]:
        """Where there is speech in what `decode` wrote, in order; raises as `decode`."""
        rules = voice.rules
        found = await self._listening.run(
            find_speech,
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


class SpeechMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.heard = counter("audio_seconds", "Seconds of audio given to speech models")
        self._skipped = counter("audio_skipped_seconds", "Seconds of audio left out because they hold no speech")

    def transcribed(self, route: Route, heard_s: float, skipped_s: float) -> None:
        """Count a finished request."""
        labels = (route.model, route.device)
        self.heard.labels(*labels).inc(heard_s)
        self._skipped.labels(*labels).inc(max(0.0, skipped_s))


def declare_speech_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["seconds of audio"] = telemetry.own(SpeechMetrics).heard


# A window whose loudest tenth of a second stays below this (of 32,768, −84 dB) has no sound: no more than the noise of
# rounding to 16 bits. Models invent words for it.
_SILENCE = 2.0


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """What a request asks for; see `messages.TranscribeJob`."""

    model: str | None = None
    language: str | None = None
    translate: bool = False
    segments: bool = False
    words: bool = False
    prompt: str = ""
    temperature: float = 0.0
    voice: VoiceChoice = field(default_factory=VoiceChoice)


@dataclass(frozen=True, slots=True)
class SpokenPart:
    """What was said in one window; times count from the beginning of the audio."""

    text: str
    segments: tuple[Span, ...]
    words: tuple[Span, ...]


@dataclass(slots=True)
class Transcription:
    """A transcription that runs: `parts` come window by window, and what is known of all of it grows with them.

    `complete`: all parts were taken.
    """

    route: Route
    seconds: float
    language: str | None
    parts: AsyncIterator[SpokenPart]
    timing: Timing
    tokens: int = 0
    busy: Busy = NOT_MEASURED
    complete: bool = False


async def find_model(services: Services, wanted: TranscriptionRequest, context: RequestContext) -> TranscriptionModel:
    """The model of a request, which is refused here before its audio is read if it cannot be served.

    Raises ModelNotFound, BadRequest, UnsupportedParameter (a language that the model does not know), Overloaded.
    """
    model = await services.manager.model_of(KIND, TranscriptionModel, wanted.model, context.deadline)
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
    decoder: AudioDecoder,
    context: RequestContext,
    wanted: TranscriptionRequest,
    voice: Voice | None,
    upload: Path,
    scratch: Path,
) -> AsyncIterator[Transcription]:
    """Transcribe a file for as long as the block lasts; the first window is done when it begins.

    With a `voice`, the model gets only what that takes for speech. Raises BadRequest (no audio, or too long), and what
    `run_single` raises; while iterating, too.
    """
    with services.tracing.operation("transcribe", {}) as operation:
        began = time.monotonic()
        model = await find_model(services, wanted, context)
        with model.activity.working():
            pcm = scratch / "audio.pcm"
            most = 60.0 * model.limits.max_audio_minutes
            seconds = await decoder.decode(upload, pcm, most, context.deadline)
            whole = Window(0, round(seconds * RATE))
            regions = [whole] if voice is None else await decoder.find_speech(pcm, voice, context.deadline)
            operation.begin("route")
            run = _Run(services, model, context, wanted, pcm, regions, began, operation)
            result = await run.begin(seconds)
            yield result
            if not result.complete:  # a streamed reply has reported the error itself, or its reader has left
                return
            usage = Usage(max(1, round(run.heard_s * RATE) // SAMPLES_PER_POSITION), result.tokens)
            operation.answered(usage, busy=result.busy)
            timing = replace(result.timing, total=(time.monotonic() - context.arrived) * 1e3)
            services.telemetry.finished(result.route, usage, timing, busy=result.busy)
            services.telemetry.own(SpeechMetrics).transcribed(result.route, run.heard_s, seconds - run.heard_s)


class _Run:
    """The windows of one transcription, in order: of the whole recording, or of its regions of speech.

    Each is transcribed alone, with the caller's prompt: after the text of an earlier window, a small model gives no
    times.
    """

    def __init__(
        self,
        services: Services,
        model: TranscriptionModel,
        context: RequestContext,
        wanted: TranscriptionRequest,
        pcm: Path,
        regions: Sequence[Window],
        began: float,
        operation: Operation,
    ) -> None:
        self._services, self._model, self._context, self._wanted = services, model, context, wanted
        self._pcm, self._regions, self._began, self._operation = pcm, deque(regions), began, operation
        self._language = wanted.language
        self.heard_s = 0.0

    async def begin(self, seconds: float) -> Transcription:
        """Do the first window with speech, which decides device and language, and return what goes on from there."""
        first, answer = await self._next()
        if answer is None:
            # Without speech the answer still names a device, which must have run something.
            answer = await self._ask(bytes(SAMPLE_BYTES * RATE))
        transcript = answer.result
        self._language = self._language or transcript.language
        result = Transcription(
            answer.route,
            seconds,
            self._language,
            self._parts(first),
            answer.timing,
            transcript.tokens,
            transcript.busy,
        )
        self._result = result
        return result

    async def _parts(self, first: SpokenPart | None) -> AsyncIterator[SpokenPart]:
        part = first
        try:
            while part is not None:
                yield part
                part, answer = await self._next(after=self._result.route)
                if answer is not None:
                    self._add(answer)
        except Exception as error:
            # A reply that streams renders the error itself, inside of the block of the operation.
            self._operation.failed(error)
            raise
        self._result.complete = True

    def _add(self, answer: Answer[Transcript]) -> None:
        result, transcript = self._result, answer.result
        result.tokens += transcript.tokens
        result.busy = result.busy.plus(transcript.busy)
        result.timing = replace(result.timing, inference=result.timing.inference + answer.timing.inference)

    async def _next(self, after: Route | None = None) -> tuple[SpokenPart | None, Answer[Transcript] | None]:
        """The next window with speech; (None, None) when the audio is over."""
        while (window := await asyncio.to_thread(next_window, self._pcm, self._regions)) is not None:
            samples = await asyncio.to_thread(read_samples, self._pcm, window)
            if not _silent(samples):
                self.heard_s += window.seconds
                answer = await self._ask(samples.tobytes(), after)
                return _spoken(window, answer.result), answer
        return None, None

    async def _ask(self, samples: bytes, after: Route | None = None) -> Answer[Transcript]:
        job = _job(self._wanted, samples, self._context, self._language)
        demand = _demand(self._model, self._context, self._wanted, job.prompt_tokens)
        if after is not None:
            # The head of the reply may be out, and names this device.
            demand = replace(demand, require=after.device)
        run = SingleRun(
            demand,
            self._context,
            job,
            Transcript,
            1,
            lambda _limits: Work(job.prompt_tokens),
            self._began,
            time.monotonic(),
        )
        if after is None:
            return await run_single(self._services, run, self._operation)
        # The route is that of the first window, and so is the reason for it, in the trace too.
        selection = await select_placement(demand, self._context)
        answer = await run_selected(self._services, run, selection, self._operation)
        return replace(answer, route=replace(answer.route, reason=after.reason))


def _job(wanted: TranscriptionRequest, samples: bytes, context: RequestContext, language: str | None) -> TranscribeJob:
    return TranscribeJob(
        0,
        samples,
        context.deadline,
        language=language,
        translate=wanted.translate,
        segments=wanted.segments,
        words=wanted.words,
        prompt=wanted.prompt,
        temperature=wanted.temperature,
        interactive=context.interactive,
    )


def _demand(model: TranscriptionModel, context: RequestContext, wanted: TranscriptionRequest, positions: int) -> Demand:
    detects = model.multilingual and wanted.language is None
    needs: frozenset[Feature] = frozenset({"language_detection"}) if detects else NOTHING
    return Demand(model.id, model.placements, positions, positions, require=context.require_device, needs=needs)


def _silent(samples: np.ndarray[tuple[int, ...], np.dtype[np.int16]]) -> bool:
    frame = RATE // 10
    whole = samples[: max(frame, len(samples) // frame * frame)].astype(np.float32)
    frames = whole.reshape(-1, frame) if len(whole) % frame == 0 and len(whole) else whole[None]
    return bool(np.sqrt((frames**2).mean(axis=1)).max() < _SILENCE)


def _spoken(window: Window, transcript: Transcript) -> SpokenPart:
    def moved(span: Span) -> Span:
        # A model hears 30 s, whatever the window has, and may name times after its end.
        begin, end = (window.offset_s + min(time, window.seconds) for time in (span.begin, span.end))
        return Span(begin, end, span.text)

    return SpokenPart(transcript.text, tuple(map(moved, transcript.segments)), tuple(map(moved, transcript.words)))


# Texts with times in the forms that players and editors read.


def srt(segments: Iterable[Span]) -> str:
    """SubRip: numbered blocks with a comma before the milliseconds."""
    blocks = (
        f"{number}\n{_clock(span.begin, ',')} --> {_clock(span.end, ',')}\n{_cue(span.text)}\n"
        for number, span in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def vtt(segments: Iterable[Span]) -> str:
    """WebVTT: blocks under a header, with a point before the milliseconds."""
    blocks = (f"{_clock(span.begin, '.')} --> {_clock(span.end, '.')}\n{_cue(span.text)}\n" for span in segments)
    return "\n".join(("WEBVTT\n", *blocks))


def whole(texts: Iterable[str]) -> str:
    """The text of all windows; each begins with its own blank where its language has one."""
    return "".join(texts).strip()


def _cue(text: str) -> str:
    # A blank line, or an arrow, would end or begin a cue.
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
