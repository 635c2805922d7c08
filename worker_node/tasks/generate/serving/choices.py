"""Several generations for one request: more than one choice, or more than one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from worker_node.domain import Finished, Piece, Route, Sampling
from worker_node.errors import BadRequest
from worker_node.serving.places import Explained, Explanation
from worker_node.serving.services import Services
from worker_node.tasks.generate.serving.requests import GenerationRequest
from worker_node.tasks.generate.serving.service import GenerationRun, generate

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
        runs = []
        for request in requests:
            runs.append(await stack.enter_async_context(generate(services, request, whole=whole)))
            _check_places(runs[0], len(requests))
        written = [0] * len(runs)
        events = _only(runs[0], written) if len(runs) == 1 else _merged(runs, written)
        yield Choices(tuple(runs), await stack.enter_async_context(aclosing(events)), written)


def _check_places(run: GenerationRun, count: int) -> None:
    """Raise BadRequest for more answers than the model has places for: they would never all be admitted."""
    demand = run.runs.demand
    most = max(placement.admission.limits.max_outstanding for placement in demand.placements)
    if count > most:
        raise BadRequest(
            f"{count} answers were asked for at once; {demand.model} has places for {most} (max_outstanding), ask for "
            "fewer"
        )


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
