"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import Route
from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.manager.placement import Placement
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation, Tracing
from worker_node.scheduling.admission import Work
from worker_node.serving.routing import select_placement
from worker_node.serving.run import Execution, Services
from worker_node.tasks.generate.answer import Answer, BlockEvent, Event, Finished
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.messages import EDGE_ONLY, GenerateJob, TokenDelta
from worker_node.tasks.generate.metrics import GenerationMetrics
from worker_node.tasks.generate.prompting import PreparedGeneration, generation_model, images_of, prepare_generation
from worker_node.tasks.generate.request import GenerationRequest, TokenIds

# Seconds between reports of an answer's progress to admission and metrics.
_REPORT_S = 0.25


@asynccontextmanager
async def generate(
    services: Services, request: GenerationRequest, *, stream: bool = True, index: int = 0
) -> AsyncIterator[Generation]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    Without `stream` only the end comes, with all of the answer: until then it can be run again.
    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    with trace_generation(services.tracing, request) as operation, ExitStack() as in_use:
        try:
            began = time.monotonic()
            images = images_of(request)
            model = await generation_model(services.manager, request.model, context.deadline, seeing=bool(images))
            in_use.enter_context(model.activity.working())
            prepared = await prepare_generation(services, model, request, images)
            tokenize_s = time.monotonic() - began
            if operation.recording:
                operation.begin("route")
            selection = await select_placement(prepared.demand, context)
            if operation.recording:
                operation.routed(selection.route)
            work = Work(prepared.demand.prompt_tokens, _most_tokens(prepared, selection.placement))
            execution = Execution(prepared.demand, context, selection, work=work, strict_proof=services.require_proof)
            with execution.admitted():
                if operation.recording:
                    operation.submitted(selection.placement.engine)
                reader = _Reader(
                    telemetry=services.telemetry,
                    operation=operation,
                    prepared=prepared,
                    execution=execution,
                    tokenize_s=tokenize_s,
                    stream=stream,
                    index=index,
                )
                async with aclosing(reader.events()) as events:
                    if execution.proof_required:
                        # The first token shows whether the NPU works, while the status can still say so.
                        await anext(events)
                    # The head of a streamed reply names the device.
                    execution.pinned = stream
                    yield Generation(prepared, execution, events)
        except NodeError as error:
            request.name_field(error)
            raise


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


class ChoiceEvents(NamedTuple):
    """What happened at once in the generation number `choice`, which has made `tokens` so far."""

    choice: int
    events: Sequence[Event]
    tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that has been routed and admitted: its headers are known, its `events` are still to come."""

    prepared: PreparedGeneration
    execution: Execution
    events: AsyncIterator[ChoiceEvents]

    @property
    def loading_s(self) -> float:
        """How long it waited for its model to be loaded."""
        return self.execution.selection.loading_s

    @property
    def route(self) -> Route:
        """The current route; without a stream a retry may change it until the end."""
        return self.execution.route


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Reads the answer of an admitted generation, in as many attempts as it takes, and reports its progress."""

    telemetry: Telemetry
    operation: Operation
    prepared: PreparedGeneration
    execution: Execution
    tokenize_s: float
    stream: bool
    index: int

    async def events(self) -> AsyncGenerator[ChoiceEvents, None]:
        """Yield changes of blocks, then `Finished`. A stop sequence ends the generation in the engine too.

        Where the NPU must be proven, what is yielded first is empty, when the first token has proven it.
        """
        operation, execution = self.operation, self.execution
        waiting = execution.proof_required
        try:
            while not execution.done:
                answer, last = self._new_answer(), []
                async with aclosing(self._attempt(answer)) as changes:
                    async for last in changes:
                        if waiting:
                            waiting = False
                            yield ChoiceEvents(self.index, (), 0)
                        if last and self.stream and not answer.complete:
                            yield ChoiceEvents(self.index, last, answer.tokens)
            if execution.proof_required:
                execution.prove(answer.busy)
            rest = answer.flush()
            finished = answer.finished(self.prepared.request.context.arrived, self.tokenize_s)
            count_generation(self.telemetry, execution.selection.route, finished)
            if operation.recording:
                reason = finished.finish_reason.value
                operation.answered(finished.usage, finish_reason=reason, busy=finished.busy, ended=answer.at)
            events = [*last, *rest, finished] if self.stream else [finished]
            yield ChoiceEvents(self.index, events, answer.tokens)
        except NodeError as error:
            operation.failed(error)
            raise

    async def _attempt(self, answer: Answer) -> AsyncGenerator[list[BlockEvent], None]:
        """Read one attempt into the answer, and yield its changes."""
        execution = self.execution
        route = execution.selection.route
        counter = self.telemetry.own(GenerationMetrics).tokens.labels(route.model, route.device)
        # Admission and metrics hear of the first token, of the end, and from time to time between them.
        report_at = 0.0
        try:
            async with execution.attempt(self._job(), TokenDelta) as deltas:
                async for delta in deltas:
                    execution.sent = self.stream
                    changes = answer.push(delta)
                    if answer.first_token is None:
                        # The engine works on the request.
                        if execution.proof_required:
                            execution.prove(delta.busy)
                        answer.first_token = time.monotonic()
                        answer.started = delta.started or answer.submitted
                        if self.operation.recording:
                            self.operation.begin("prefill", answer.started)
                            self.operation.begin("decode", answer.at)
                    if answer.at >= report_at or answer.complete or delta.prefilled:
                        report_at = answer.at + _REPORT_S
                        prefilled, ended = (delta.prefilled, delta.prefill_s), answer.complete
                        execution.permit.progressed(answer.unreported, at=answer.at, prefilled=prefilled, ended=ended)
                        counter.inc(answer.unreported)
                        answer.unreported = 0
                    yield changes
                    if answer.complete:
                        break
        finally:
            counter.inc(answer.unreported)

    def _job(self) -> GenerateJob:
        """The job of the next attempt: another placement may leave less room for the answer."""
        prepared, request = self.prepared, self.prepared.request
        return GenerateJob(
            id=0,
            tokens=np.asarray(prepared.prompt.tokens, TOKEN_DTYPE).tobytes(),
            max_new_tokens=_most_tokens(prepared, self.execution.selection.placement),
            deadline=request.context.deadline,
            sampling=structs.replace(request.sampling, **EDGE_ONLY),
            interactive=request.context.interactive,
            grammar=prepared.grammar,
            vision_prompt=prepared.prompt.vision_prompt,
            streamed_until=request.context.ends if self.stream else 0.0,
        )

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


def _most_tokens(prepared: PreparedGeneration, placement: Placement) -> int:
    """How many tokens the answer may have at a placement: no more than its window leaves."""
    request = prepared.request
    window = min(placement.total_limit, request.context_limit or placement.total_limit)
    room = min(prepared.model.max_tokens_limit, window - prepared.demand.prompt_tokens)
    return min(room, request.sampling.max_new_tokens or room)


def count_generation(telemetry: Telemetry, route: Route, finished: Finished) -> None:
    """Count a finished generation; its tokens were counted as they came."""
    timing, tokens = finished.timing, finished.usage.completion_tokens
    telemetry.finished(route, finished.usage, timing, busy=finished.busy)
    if timing.first_token is None:
        return
    own = telemetry.own(GenerationMetrics)
    own.first_token.labels(route.model, route.device).observe(timing.first_token / 1e3)
    telemetry.first_tokens.append((time.monotonic(), timing.first_token / 1e3))
    if tokens > 1:
        between = (timing.total - timing.first_token) / 1e3 / (tokens - 1)
        own.inter_token.labels(route.model, route.device).observe(between)


# Several generations for one request: more than one choice, or more than one prompt.

# Events that may wait for a slow reader before the generations that made them are held up.
_BUFFERED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class Choices:
    """Admitted generations of the model of that id, and their events as they arise.

    The `routes` are final where a stream follows: its head names them.
    """

    model: str
    runs: tuple[Generation, ...]
    routes: tuple[Route, ...]
    events: AsyncIterator[ChoiceEvents]


def repeated(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """The request `count` times over; with a seed, the later ones take the seeds that follow."""
    sampling, requests = request.sampling, []
    for index in range(count):
        seed = None if sampling.seed is None else sampling.seed + index
        one = structs.replace(sampling, seed=seed, choices=count, rank=index)
        requests.append(replace(request, sampling=one))
    return requests


@asynccontextmanager
async def generate_choices(
    services: Services, requests: Sequence[GenerationRequest], *, stream: bool = True
) -> AsyncIterator[Choices]:
    """Run the generations side by side for as long as the block lasts; leaving it early cancels them all.

    `stream`: see `generate`. Raises what `generate` raises; the failure of one is the failure of all. Raises BadRequest
    for more at once than the model has places for: not all would ever be admitted.
    """
    async with AsyncExitStack() as stack:
        runs: list[Generation] = []
        for index, request in enumerate(requests):
            run = await stack.enter_async_context(generate(services, request, stream=stream, index=index))
            runs.append(run)
            if len(requests) > 1:
                _check_places(run.prepared.model, len(requests))
        events = runs[0].events if len(runs) == 1 else await stack.enter_async_context(aclosing(_merged(runs)))
        routes = [run.execution.route for run in runs]
        yield Choices(runs[0].prepared.demand.model, tuple(runs), tuple(routes), events)


def _check_places(model: GenerationModel, count: int) -> None:
    most = max(placement.admission.limits.max_outstanding for placement in model.placements)
    if count > most:
        raise BadRequest(
            f"{count} answers were asked for at once; {model.id} has places for {most} (max_outstanding), ask for fewer"
        )


async def _merged(runs: Sequence[Generation]) -> AsyncGenerator[ChoiceEvents, None]:
    """The events of several generations as they arise."""
    queue: asyncio.Queue[ChoiceEvents | Exception] = asyncio.Queue(_BUFFERED_EVENTS)

    async def forward(run: Generation) -> None:
        try:
            async for events in run.events:
                await queue.put(events)
        except Exception as error:  # noqa: BLE001  (raised again below, where the reader is)
            await queue.put(error)

    tasks = [asyncio.create_task(forward(run)) for run in runs]
    try:
        open_runs = len(runs)
        while open_runs:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            open_runs -= isinstance(item.events[-1], Finished)
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
