"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from worker_node.core.types import Finished, FinishReason, Piece, Route, Sampling, Timing, TokenLogprob, Usage
from worker_node.manager.placement import Placement
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import Permit, Work
from worker_node.serving.places import Explained, Explanation, Place, errors_of, select_placement
from worker_node.serving.run import Proof, Runs, Services, after_first, run_again
from worker_node.tasks.generate.answer_text import AnswerText, PieceReader
from worker_node.tasks.generate.images import images_of
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.tasks.generate.metrics import count_generation, token_counter, trace_generation
from worker_node.tasks.generate.model import GenerationModel, GenerationRequest, generation_model
from worker_node.tasks.generate.prompting import PreparedGeneration, generate_job, prepare_generation


@dataclass(slots=True)
class AnswerProgress:
    """How many tokens of an answer have been generated."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRun:
    """A generation that has been routed and admitted: its headers are known, its tokens are still to come.

    It waited for `loading_s` seconds for its model to be loaded.
    """

    runs: Runs
    proof: Proof
    events: AsyncIterator[Piece | Finished]
    progress: AnswerProgress
    loading_s: float = 0.0

    @property
    def route(self) -> Route:
        """The current route; it may change in a rerun until part of the answer has been sent."""
        return replace(self.runs.place.route, unproven=self.proof.unread)

    def head(self) -> Route:
        """The route for a head that is sent before the first token: from then on it stays on that device."""
        self.runs.tell_device()
        return self.route


@asynccontextmanager
async def generate(
    services: Services, request: GenerationRequest, *, whole: bool = False
) -> AsyncIterator[GenerationRun]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    For an answer that is sent as a `whole`, events come when it is complete: until then it can be run again.
    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    with trace_generation(services.tracing, request) as operation, ExitStack() as in_use:
        began = time.monotonic()
        seeing = bool(images_of(request.prompt))
        model = await generation_model(services.manager, request.model, context.deadline, seeing=seeing)
        in_use.enter_context(model.activity.used_by(context))
        prepared = await prepare_generation(services, model, request)
        request = prepared.request
        tokenize_s = time.monotonic() - began
        operation.tokenized(began)
        place = await select_placement(prepared.demand, context)
        operation.routed(place.route)
        prompt = prepared.prompt
        job = generate_job(request, prompt, place.candidate, prepared.model.max_tokens_limit)
        work = Work(prompt.count, job.max_new_tokens, exact=job.ignore_eos)

        def permit(placement: Placement) -> AbstractContextManager[Permit]:
            return placement.admission.permit(1, context.deadline, work=work, interactive=context.interactive)

        runs = Runs(prepared.demand, context, place, permit)
        with errors_of(lambda: runs.place.route), runs.admitted() as runs.permit:
            proof = Proof.of(place.route, context, strict=services.require_proof)
            watch = _Watch(operation, services.telemetry, proof, progress := AnswerProgress())
            async with (
                aclosing(_run(request, prepared, runs, tokenize_s, watch, whole=whole)) as events,
                aclosing(_counted(services.telemetry, operation, runs, events)) as counted,
            ):
                if not proof.required:
                    yield GenerationRun(runs, proof, counted, progress, place.loading_s)
                    return
                # The first token shows whether the NPU works, while the status can still say so.
                async with aclosing(await after_first(counted)) as proven:
                    yield GenerationRun(runs, proof, proven, progress, place.loading_s)


@dataclass(frozen=True, slots=True)
class _Watch:
    """The observers of a generation: its trace, the metrics, the proof that the NPU ran it, the answer's length."""

    operation: Operation
    telemetry: Telemetry
    proof: Proof
    progress: AnswerProgress


async def _counted(
    telemetry: Telemetry, operation: Operation, runs: Runs, events: AsyncIterator[Piece | Finished]
) -> AsyncGenerator[Piece | Finished, None]:
    # Here as well as around the whole: a reply that streams renders the error itself, inside of the caller's block.
    with errors_of(lambda: runs.place.route), operation.watch():
        async for event in events:
            if isinstance(event, Finished):
                count_generation(telemetry, runs.place.route, event)
                operation.answered(
                    event.usage,
                    finish_reason=event.finish_reason.value,
                    busy_us=event.npu_busy_delta_us,
                    busy_shared=event.npu_busy_shared,
                )
            yield event


class _Answer:
    """An answer under construction: its text, and the data for its last event."""

    def __init__(self, request: GenerationRequest, prepared: PreparedGeneration, submitted: float) -> None:
        use = request.tool_use
        self._model = prepared.model
        self._text = AnswerText(prepared.model.tokenizer, request.sampling)
        self._reader = PieceReader(prepared.prompt.parser, single=use is not None and use.single)
        self._finish = FinishReason.STOP
        self._prompt_tokens = prepared.prompt.count
        self._reasoning_tokens = 0
        self._busy_shared = False
        self.tokens = 0
        self.busy_us: int | None = None
        self._submitted = submitted
        # Monotonic, as known once there is a token.
        self.started = submitted
        self.first_token: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has ended, even if the engine still sends tokens."""
        return self._text.ended

    def push(self, delta: TokenDelta) -> Iterator[Piece]:
        """Add tokens; yields the pieces that are certain now."""
        before = self._text.tokens
        text = self._text.push(delta.tokens)
        self.tokens = self._text.tokens
        taken = self.tokens - before
        logprobs = _logprobs(self._model, delta.tokens[:taken], delta.logprobs[:taken]) if delta.logprobs else ()
        yield from self._reader.read(text, logprobs)
        self._reasoning_tokens += taken if self._reader.reasoning else 0
        self.busy_us, self._busy_shared = delta.busy_us, delta.busy_shared
        self._prompt_tokens = delta.prompt_tokens or self._prompt_tokens
        if delta.finish is not None and not self.stopped:
            self._finish = FinishReason(delta.finish)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back, at the end."""
        yield from self._reader.finish(self._text.flush())

    def finished(self, arrived: float, tokenize_s: float) -> Finished:
        """The last event, as of now."""
        now = time.monotonic()
        return Finished(
            finish_reason=_reason(self._finish, stopped=self.stopped, called=self._reader.called),
            usage=Usage(self._prompt_tokens, self.tokens, self._reasoning_tokens),
            timing=Timing(
                queue=max(0.0, self.started - self._submitted) * 1e3,
                tokenize=tokenize_s * 1e3,
                inference=(now - self.started) * 1e3,
                total=(now - arrived) * 1e3,
                first_token=None if self.first_token is None else (self.first_token - arrived) * 1e3,
            ),
            npu_busy_delta_us=self.busy_us,
            npu_busy_shared=self._busy_shared,
            stop_sequence=self._text.matched,
        )


async def _run(
    request: GenerationRequest,
    prepared: PreparedGeneration,
    runs: Runs,
    tokenize_s: float,
    watch: _Watch,
    *,
    whole: bool,
) -> AsyncGenerator[Piece | Finished, None]:
    """Yield pieces as they become certain, then `Finished`. A stop sequence ends the generation in the engine too."""
    submitted = time.monotonic()
    watch.operation.submitted(runs.place.placement.engine)
    answer, held = _Answer(request, prepared, submitted), list[Piece]()

    def job(place: Place) -> GenerateJob:
        return generate_job(request, prepared.prompt, place.candidate, prepared.model.max_tokens_limit)

    def begin_anew() -> None:
        nonlocal answer
        answer = _Answer(request, prepared, submitted)
        held.clear()

    async with aclosing(run_again(runs, job, TokenDelta, begin_anew if whole else None)) as deltas:
        async for delta in deltas:
            if answer.first_token is None:
                count = token_counter(watch.telemetry, runs.place.route)
                watch.proof.check(delta.busy_us)
                answer.first_token = time.monotonic()
                answer.started = delta.started or submitted
                watch.operation.started(answer.started)
                watch.operation.first_token(delta.at or answer.first_token)
            count(len(delta.tokens))
            runs.permit.progressed(len(delta.tokens), at=delta.at, prefilled=(delta.prefilled, delta.prefill_s))
            watch.progress.tokens = answer.tokens + len(delta.tokens)
            for piece in answer.push(delta):
                watch.progress.tokens = answer.tokens
                if whole:
                    held.append(piece)
                else:
                    yield piece
            if answer.stopped or delta.finish is not None:
                watch.operation.ended(delta.at or time.monotonic())
                runs.permit.answered(by_itself=answer.stopped or delta.finish == FinishReason.STOP)
            if answer.stopped:
                break
    watch.proof.check(answer.busy_us)
    for piece in [*held, *answer.flush()]:
        yield piece
    yield answer.finished(request.context.arrived, tokenize_s)


def _reason(finish: FinishReason, *, stopped: bool, called: bool) -> FinishReason:
    if stopped:
        return FinishReason.STOP
    # An answer that was cut within a call is cut, not a call.
    return FinishReason.TOOL_CALLS if called and finish is FinishReason.STOP else finish


def _logprobs(model: GenerationModel, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
    """The probabilities of tokens that are text; special tokens, such as the end of the answer, have none."""
    pieces = [(model.tokenizer.piece(token), value) for token, value in zip(tokens, logprobs, strict=True)]
    return tuple(TokenLogprob(piece.decode("utf-8", "replace"), piece, value) for piece, value in pieces if piece)


# Several generations for one request: more than one choice, or more than one prompt.

# Events that may wait for a slow reader before the generations that made them are held up.
_BUFFERED_EVENTS = 64

ChoiceEvent = tuple[int, Piece | Finished]


@dataclass(frozen=True, slots=True)
class Choices:
    """Admitted generations whose events come as they arise, each with the index of its generation.

    `written` are the tokens of each generation up to its latest event.
    """

    runs: tuple[GenerationRun, ...]
    events: AsyncIterator[ChoiceEvent]
    written: list[int]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Where they run."""
        return tuple(run.route for run in self.runs)

    def head(self) -> Route:
        """The route for a head that is sent before the first token; see `GenerationRun.head`."""
        heads = [run.head() for run in self.runs]
        return heads[0]


def repeated(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """The request `count` times over; with a seed, the later ones take the seeds that follow."""
    return [replace(request, sampling=_choice(request.sampling, index, count)) for index in range(count)]


def _choice(sampling: Sampling, index: int, count: int) -> Sampling:
    seed = None if sampling.seed is None else sampling.seed + index
    return replace(sampling, seed=seed, choices=count)


@asynccontextmanager
async def generate_choices(
    services: Services, requests: Sequence[GenerationRequest], *, whole: bool = False
) -> AsyncIterator[Choices]:
    """Run the generations side by side for as long as the block lasts; leaving it early cancels them all.

    `whole`: see `generate`.
    Raises what `generate` raises; the failure of one is the failure of all.
    """
    if requests[0].context.dry_run:
        raise Explained(await _explain(services, requests))
    async with AsyncExitStack() as stack:
        runs = [await stack.enter_async_context(generate(services, request, whole=whole)) for request in requests]
        written = [0] * len(runs)
        events = _only(runs[0], written) if len(runs) == 1 else _merged(runs, written)
        yield Choices(tuple(runs), await stack.enter_async_context(aclosing(events)), written)


async def _explain(services: Services, requests: Sequence[GenerationRequest]) -> Explanation:
    """The first refusal among the dry runs, else the first route, which is what the reply's headers tell."""
    explanations: list[Explanation] = []
    for request in requests:
        try:
            async with generate(services, request):
                raise AssertionError("a dry run does not run")
        except Explained as explained:
            explanations.append(explained.explanation)
            if explained.explanation.refusal is not None:
                return explained.explanation
    return explanations[0]


async def _only(run: GenerationRun, written: list[int]) -> AsyncGenerator[ChoiceEvent, None]:
    async for event in run.events:
        written[0] = run.progress.tokens
        yield 0, event


async def _merged(runs: Sequence[GenerationRun], written: list[int]) -> AsyncGenerator[ChoiceEvent, None]:
    queue: asyncio.Queue[tuple[ChoiceEvent, int] | Exception] = asyncio.Queue(_BUFFERED_EVENTS)

    async def forward(index: int, run: GenerationRun) -> None:
        try:
            async for event in run.events:
                await queue.put(((index, event), run.progress.tokens))
        except Exception as error:  # noqa: BLE001  (raised again below, where the reader is)
            await queue.put(error)

    tasks = [asyncio.create_task(forward(index, run)) for index, run in enumerate(runs)]
    try:
        open_runs = len(runs)
        while open_runs:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            (index, event), tokens = item
            written[index] = tokens
            open_runs -= isinstance(event, Finished)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
