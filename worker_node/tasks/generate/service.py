"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from worker_node.core.errors import BadRequest
from worker_node.core.types import Finished, FinishReason, Piece, Route, Sampling, Timing, TokenLogprob, Usage
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import Work
from worker_node.serving.routing import Explained, Explanation, select_placement
from worker_node.serving.run import Execution, Proof, Services, after_first
from worker_node.tasks.generate.answer_text import AnswerText, PieceReader
from worker_node.tasks.generate.images import images_of
from worker_node.tasks.generate.messages import TokenDelta
from worker_node.tasks.generate.metrics import count_generation, token_counter, trace_generation
from worker_node.tasks.generate.model import GenerationModel, GenerationRequest, generation_model
from worker_node.tasks.generate.prompting import PreparedGeneration, prepare_generation


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
        tokenize_s = time.monotonic() - began
        operation.tokenized(began)
        selection = await select_placement(prepared.demand, context)
        operation.routed(selection.route)
        job = prepared.job(selection.placement)
        work = Work(prepared.prompt.count, job.max_new_tokens, exact=job.ignore_eos)
        with Execution(prepared.demand, context, selection, work=lambda _limits: work).admitted() as execution:
            proof = Proof.of(selection.route, context, strict=services.require_proof)
            run = GenerationRun(services.telemetry, operation, prepared, execution, proof, tokenize_s, whole=whole)
            async with AsyncExitStack() as stack:
                run.events = await stack.enter_async_context(aclosing(run.answer()))
                if proof.required:
                    # The first token shows whether the NPU works, while the status can still say so.
                    run.events = await stack.enter_async_context(aclosing(await after_first(run.events)))
                yield run


class GenerationRun:
    """A generation that has been routed and admitted: its headers are known, its `events` are still to come.

    It waited for `loading_s` seconds for its model to be loaded. `tokens` have been generated so far.
    """

    events: AsyncGenerator[Piece | Finished, None]

    def __init__(
        self,
        telemetry: Telemetry,
        operation: Operation,
        prepared: PreparedGeneration,
        execution: Execution,
        proof: Proof,
        tokenize_s: float,
        *,
        whole: bool,
    ) -> None:
        self._telemetry = telemetry
        self._operation = operation
        self._prepared = prepared
        self._execution = execution
        self._proof = proof
        self._tokenize_s = tokenize_s
        self._whole = whole
        self.loading_s = execution.selection.loading_s
        self.tokens = 0

    @property
    def route(self) -> Route:
        """The current route; a retry may change it until part of the answer has been sent."""
        return replace(self._execution.route, unproven=self._proof.unread)

    def head(self) -> Route:
        """The route for a head that is sent before the first token: from then on it stays on that device."""
        self._execution.pin_device()
        return self.route

    def check_places(self, count: int) -> None:
        """Raise BadRequest for more answers at once than the model has places for: not all would ever be admitted."""
        model = self._prepared.model
        most = max(placement.admission.limits.max_outstanding for placement in model.placements)
        if count > most:
            raise BadRequest(
                f"{count} answers were asked for at once; {model.id} has places for {most} (max_outstanding), ask for "
                "fewer"
            )

    async def answer(self) -> AsyncGenerator[Piece | Finished, None]:
        """Yield pieces as they become certain, then `Finished`. A stop sequence ends the generation in the engine too.

        For an answer that is sent as a whole all pieces come at its end: a retry starts it from its beginning.
        """
        operation, execution, prepared, whole = self._operation, self._execution, self._prepared, self._whole
        submitted = time.monotonic()
        operation.submitted(execution.selection.placement.engine)
        # Here as well as around the block: a reply that streams renders the error itself, inside of the block.
        with execution.naming_route(), operation.watch():
            while not execution.done:
                answer, held = _Answer(prepared, submitted), list[Piece]()
                async with execution.attempt(prepared.job(execution.selection.placement), TokenDelta) as deltas:
                    async for delta in deltas:
                        execution.sent = not whole
                        if answer.first_token is None:
                            count = token_counter(self._telemetry, execution.route)
                            self._proof.check(delta.busy_us)
                            answer.first_token = time.monotonic()
                            answer.started = delta.started or submitted
                            operation.started(answer.started)
                            operation.first_token(delta.at or answer.first_token)
                        count(len(delta.tokens))
                        prefilled = (delta.prefilled, delta.prefill_s)
                        execution.permit.progressed(len(delta.tokens), at=delta.at, prefilled=prefilled)
                        self.tokens = answer.tokens + len(delta.tokens)
                        for piece in answer.push(delta):
                            self.tokens = answer.tokens
                            if whole:
                                held.append(piece)
                            else:
                                yield piece
                        if answer.stopped or delta.finish is not None:
                            operation.ended(delta.at or time.monotonic())
                            execution.permit.answered()
                        if answer.stopped:
                            break
            self._proof.check(answer.busy_us)
            for piece in [*held, *answer.flush()]:
                yield piece
            finished = answer.finished(prepared.request.context.arrived, self._tokenize_s)
            count_generation(self._telemetry, execution.route, finished)
            operation.answered(
                finished.usage,
                finish_reason=finished.finish_reason.value,
                busy_us=finished.npu_busy_delta_us,
                busy_shared=finished.npu_busy_shared,
            )
            yield finished


class _Answer:
    """An answer under construction: its text, and the data for its last event."""

    def __init__(self, prepared: PreparedGeneration, submitted: float) -> None:
        use = prepared.request.tool_use
        self._model = prepared.model
        self._text = AnswerText(prepared.model.tokenizer, prepared.request.sampling)
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


class ChoiceEvent(NamedTuple):
    """An event of the generation number `choice`, which has made `tokens` so far."""

    choice: int
    event: Piece | Finished
    tokens: int


@dataclass(frozen=True, slots=True)
class Choices:
    """Admitted generations, and their events as they arise."""

    runs: tuple[GenerationRun, ...]
    events: AsyncIterator[ChoiceEvent]

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

    `whole`: see `generate`. Raises what `generate` raises; the failure of one is the failure of all.
    """
    if requests[0].context.dry_run:
        raise Explained(await _explain(services, requests))
    async with AsyncExitStack() as stack:
        runs: list[GenerationRun] = []
        for request in requests:
            runs.append(await stack.enter_async_context(generate(services, request, whole=whole)))
            runs[0].check_places(len(requests))
        events = await stack.enter_async_context(aclosing(_events(runs)))
        yield Choices(tuple(runs), events)


async def _explain(services: Services, requests: Sequence[GenerationRequest]) -> Explanation:
    """The first refusal among the dry runs, else the first route, which the headers of the reply would name."""
    explanations: list[Explanation] = []
    for request in requests:
        try:
            async with generate(services, request):
                raise AssertionError("a dry run does not run")
        except Explained as explained:
            explanations.append(explained.explanation)
            if explained.explanation.decision.error is not None:
                return explained.explanation
    return explanations[0]


async def _events(runs: Sequence[GenerationRun]) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of the generations as they arise."""
    if len(runs) == 1:
        async for event in runs[0].events:
            yield ChoiceEvent(0, event, runs[0].tokens)
        return
    queue: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(_BUFFERED_EVENTS)

    async def forward(index: int, run: GenerationRun) -> None:
        try:
            async for event in run.events:
                await queue.put(ChoiceEvent(index, event, run.tokens))
        except Exception as error:  # noqa: BLE001  (raised again below, where the reader is)
            await queue.put(error)

    tasks = [asyncio.create_task(forward(index, run)) for index, run in enumerate(runs)]
    try:
        open_runs = len(runs)
        while open_runs:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            open_runs -= isinstance(item.event, Finished)
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
