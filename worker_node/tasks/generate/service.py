"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import Route
from worker_node.manager.placement import Placement
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation, Tracing
from worker_node.scheduling.admission import Work
from worker_node.serving.routing import select_placement
from worker_node.serving.run import Execution, Services, after_first
from worker_node.tasks.generate.answer_text import Answer
from worker_node.tasks.generate.blocks import BlockEvent, Event, Finished
from worker_node.tasks.generate.chat import TokenIds
from worker_node.tasks.generate.messages import GenerateJob, Sampling, TokenDelta
from worker_node.tasks.generate.metrics import GenerationMetrics, count_generation
from worker_node.tasks.generate.model import GenerationRequest, generation_model
from worker_node.tasks.generate.prompting import PreparedGeneration, prepare_generation

# Seconds between reports of an answer's progress to admission and metrics.
_REPORT_S = 0.25


@asynccontextmanager
async def generate(
    services: Services, request: GenerationRequest, *, whole: bool = False, index: int = 0
) -> AsyncIterator[GenerationRun]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    Of an answer that is sent as a `whole` only the end comes, with all of it: until then it can be run again.
    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    with trace_generation(services.tracing, request) as operation, request.naming_fields(), ExitStack() as in_use:
        began = time.monotonic()
        model = await generation_model(services.manager, request.model, context.deadline, seeing=bool(request.images))
        in_use.enter_context(model.activity.working())
        prepared = await prepare_generation(services, model, request)
        tokenize_s = time.monotonic() - began
        if operation.recording:
            operation.begin("route")
        selection = await select_placement(prepared.demand, context)
        if operation.recording:
            operation.routed(selection.route)
        job = prepared.job(selection.placement, whole=whole)
        work = Work(prepared.demand.prompt_tokens, job.max_new_tokens)
        execution = Execution(prepared.demand, context, selection, work=work, strict_proof=services.require_proof)
        with execution.admitted():
            if operation.recording:
                operation.submitted(selection.placement.engine)
            run = GenerationRun(
                telemetry=services.telemetry,
                operation=operation,
                prepared=prepared,
                placement=selection.placement,
                job=job,
                execution=execution,
                tokenize_s=tokenize_s,
                whole=whole,
                index=index,
            )
            async with AsyncExitStack() as stack:
                run.events = await stack.enter_async_context(aclosing(run.answer()))
                if execution.proof_required:
                    # The first token shows whether the NPU works, while the status can still say so.
                    run.events = await stack.enter_async_context(aclosing(await after_first(run.events)))
                yield run


def trace_generation(tracing: Tracing, request: GenerationRequest) -> AbstractContextManager[Operation]:
    """Trace the generation that runs while the block does, by the semantic conventions for generative AI."""
    sampling = request.sampling
    asked: dict[str, float | str | None] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "top_k": sampling.top_k or None,
        "seed": sampling.seed,
    }
    name = "text_completion" if isinstance(request.prompt, str | TokenIds) else "chat"
    attributes = {f"gen_ai.request.{key}": value for key, value in asked.items() if value is not None}
    return tracing.operation(name, attributes)


class ChoiceEvent(NamedTuple):
    """An event of the generation number `choice`, which has made `tokens` so far."""

    choice: int
    event: Event
    tokens: int


@dataclass(slots=True, kw_only=True)
class GenerationRun:
    """A generation that has been routed and admitted: its headers are known, its `events` are still to come.

    Of an answer that is sent as a `whole` only the end comes, with all of it.
    """

    telemetry: Telemetry
    operation: Operation
    prepared: PreparedGeneration
    placement: Placement
    job: GenerateJob
    execution: Execution
    tokenize_s: float
    whole: bool
    index: int
    events: AsyncGenerator[ChoiceEvent, None] = field(init=False)

    @property
    def model(self) -> str:
        """The id of its model."""
        return self.prepared.demand.model

    @property
    def loading_s(self) -> float:
        """How long it waited for its model to be loaded."""
        return self.execution.selection.loading_s

    @property
    def route(self) -> Route:
        """The current route; a retry may change it until part of the answer has been sent."""
        return self.execution.route

    def head(self) -> Route:
        """The route for a head that is sent before the first token: from then on it stays on that device."""
        self.execution.pinned = True
        return self.route

    def check_places(self, count: int) -> None:
        """Raise BadRequest for more answers at once than the model has places for: not all would ever be admitted."""
        model = self.prepared.model
        most = max(placement.admission.limits.max_outstanding for placement in model.placements)
        if count > most:
            raise BadRequest(
                f"{count} answers were asked for at once; {model.id} has places for {most} (max_outstanding), ask for "
                "fewer"
            )

    async def answer(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Yield blocks as they grow, then `Finished`. A stop sequence ends the generation in the engine too."""
        operation, execution = self.operation, self.execution
        try:
            while not execution.done:
                answer = self._new_answer()
                async with aclosing(self._attempt(answer)) as events:
                    async for event in events:
                        yield ChoiceEvent(self.index, event, answer.tokens)
            execution.prove(answer.busy)
            last = answer.flush()
            for event in () if self.whole else last:
                yield ChoiceEvent(self.index, event, answer.tokens)
            finished = answer.finished(self.prepared.request.context.arrived, self.tokenize_s)
            count_generation(self.telemetry, execution.selection.route, finished)
            operation.answered(
                finished.usage,
                finish_reason=finished.finish_reason.value,
                busy=finished.busy,
                ended=answer.at,
            )
            yield ChoiceEvent(self.index, finished, answer.tokens)
        except NodeError as error:
            operation.failed(error)
            raise

    async def _attempt(self, answer: Answer) -> AsyncGenerator[BlockEvent, None]:
        """Read one attempt into the answer, and yield what is certain; nothing of an answer that is sent as a whole."""
        execution, job = self.execution, self._next_job()
        route = execution.selection.route
        counter = self.telemetry.own(GenerationMetrics).tokens.labels(route.model, route.device)
        # Admission and metrics hear of the first token, of the end, and from time to time between them.
        report_at = 0.0
        try:
            async with execution.attempt(job, TokenDelta) as deltas:
                async for delta in deltas:
                    execution.sent = not self.whole
                    events = answer.push(delta)
                    ended = answer.stopped or delta.finish is not None
                    if answer.first_token is None:
                        self._begun(answer, delta)
                    if answer.at >= report_at or ended or delta.prefilled:
                        report_at = answer.at + _REPORT_S
                        prefilled = (delta.prefilled, delta.prefill_s)
                        execution.permit.progressed(answer.unreported, at=answer.at, prefilled=prefilled, ended=ended)
                        counter.inc(answer.unreported)
                        answer.unreported = 0
                    for event in () if self.whole else events:
                        yield event
                    if ended:
                        break
        finally:
            counter.inc(answer.unreported)

    def _new_answer(self) -> Answer:
        prepared = self.prepared
        use, parser = prepared.request.tool_use, prepared.prompt.parser
        return Answer(
            prepared.model.tokenizer,
            prepared.request.sampling,
            None if parser is None else parser(),
            single_call=use is not None and use.single,
            prompt_tokens=prepared.demand.prompt_tokens,
        )

    def _next_job(self) -> GenerateJob:
        """The job of the next attempt: another placement may leave less room for the answer."""
        if self.execution.selection.placement is not self.placement:
            self.placement = self.execution.selection.placement
            self.job = self.prepared.job(self.placement, whole=self.whole)
        return self.job

    def _begun(self, answer: Answer, delta: TokenDelta) -> None:
        """The first tokens have come: the engine works on the request."""
        self.execution.prove(delta.busy)
        answer.first_token = time.monotonic()
        answer.started = delta.started or answer.submitted
        if self.operation.recording:
            self.operation.begin("prefill", answer.started)
            self.operation.begin("decode", answer.at)


# Several generations for one request: more than one choice, or more than one prompt.

# Events that may wait for a slow reader before the generations that made them are held up.
_BUFFERED_EVENTS = 64


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
    return structs.replace(sampling, seed=seed, choices=count, rank=index)


@asynccontextmanager
async def generate_choices(
    services: Services, requests: Sequence[GenerationRequest], *, whole: bool = False
) -> AsyncIterator[Choices]:
    """Run the generations side by side for as long as the block lasts; leaving it early cancels them all.

    `whole`: see `generate`. Raises what `generate` raises; the failure of one is the failure of all.
    """
    async with AsyncExitStack() as stack:
        runs: list[GenerationRun] = []
        for index, request in enumerate(requests):
            runs.append(await stack.enter_async_context(generate(services, request, whole=whole, index=index)))
            runs[0].check_places(len(requests))
        events = runs[0].events if len(runs) == 1 else await stack.enter_async_context(aclosing(_merged(runs)))
        yield Choices(tuple(runs), events)


async def _merged(runs: Sequence[GenerationRun]) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of several generations as they arise."""
    queue: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(_BUFFERED_EVENTS)

    async def forward(run: GenerationRun) -> None:
        try:
            async for event in run.events:
                await queue.put(event)
        except Exception as error:  # noqa: BLE001  (raised again below, where the reader is)
            await queue.put(error)

    tasks = [asyncio.create_task(forward(run)) for run in runs]
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
