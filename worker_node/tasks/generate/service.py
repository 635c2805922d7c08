"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace

from msgspec import structs

from worker_node.core.errors import BadRequest, NodeError
from worker_node.observability.tracing import UNTRACED, Operation, Tracing
from worker_node.scheduling.admission import TokenCost
from worker_node.serving.routing import select_placement
from worker_node.serving.run import Execution, Services
from worker_node.tasks.generate.answer import Reader, most_tokens
from worker_node.tasks.generate.blocks import ChoiceEvents, Finished
from worker_node.tasks.generate.prompting import PreparedGeneration, generation_model, images_of, prepare_generation
from worker_node.tasks.generate.request import GenerationRequest, TokenIds


@asynccontextmanager
async def generate(
    services: Services, request: GenerationRequest, *, stream: bool = True, index: int = 0
) -> AsyncIterator[Generation]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    Without `stream` only the end comes, with all of the answer: until then it can be run again. A caller that sends a
    part of a stream sets `execution.sent`.
    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    with trace_generation(services.tracing, request) as operation, ExitStack() as in_use:
        try:
            began = time.monotonic()
            seeing = bool(images_of(request))
            model = await generation_model(services.manager, request.model, context.deadline, seeing=seeing)
            in_use.enter_context(model.activity.working())
            prepared = await prepare_generation(services, model, request)
            tokenize_s = time.monotonic() - began
            if operation.recording:
                operation.begin("route")
            selection = await select_placement(prepared.demand, context)
            if operation.recording:
                operation.routed(selection.route)
            work = TokenCost(prepared.demand.prompt_tokens, most_tokens(prepared, selection.placement))
            execution = Execution(prepared.demand, context, selection, work=work, strict_proof=services.require_proof)
            with execution.admitted():
                if operation.recording:
                    operation.submitted(selection.placement.engine)
                reader = Reader(
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
    if not tracing.enabled:
        return nullcontext(UNTRACED)
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


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that has been routed and admitted: its headers are known, its `events` are still to come."""

    prepared: PreparedGeneration
    execution: Execution
    events: AsyncIterator[ChoiceEvents]


# Several generations for one request: more than one choice, or more than one prompt.

# Events that may wait for a slow reader before the generations that made them are held up.
_BUFFERED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class Choices:
    """Admitted generations of the model of that id, and their events as they arise."""

    model: str
    runs: Sequence[Generation]
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
                model = run.prepared.model
                most = max(placement.admission.limits.max_outstanding for placement in model.placements)
                if len(requests) > most:
                    raise BadRequest(
                        f"{len(requests)} answers were asked for at once; {model.id} has places for {most} "
                        "(max_outstanding), ask for fewer"
                    )
        events = runs[0].events if len(runs) == 1 else await stack.enter_async_context(aclosing(_merged(runs)))
        yield Choices(runs[0].prepared.demand.model, runs, events)


async def _merged(runs: Sequence[Generation]) -> AsyncGenerator[ChoiceEvents, None]:
    queue: asyncio.Queue[ChoiceEvents | Exception] = asyncio.Queue(_BUFFERED_EVENTS)

    async def forward(run: Generation) -> None:
        try:
            async for events in run.events:
                # What waits in the queue will be sent.
                run.execution.sent = True
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
