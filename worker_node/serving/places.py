"""From what a request needs to the placement that runs it, loading one on demand; or only to the explanation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from worker_node.domain import Device, RequestContext, Route
from worker_node.engines.base import EngineState
from worker_node.errors import DeadlineExceeded, ModelLoading, NodeError, Overloaded
from worker_node.routing import Candidate, Decision, choose
from worker_node.serving.placement import Placement


@dataclass(frozen=True, slots=True)
class Demand:
    """What routing must know of a request. `prompt_tokens` is its longest prompt, `token_count` all of its tokens."""

    model: str
    placements: Sequence[Placement]
    prompt_tokens: int
    token_count: int
    max_new_tokens: int = 0
    require: Device | None = None

    def decide(self, candidates: Sequence[Candidate]) -> Decision:
        """See `routing.choose`."""
        return choose(
            self.model,
            candidates,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            require=self.require,
        )

    def route(self, decision: Decision) -> Route:
        """The decision as replies tell it."""
        placement = self.placements[decision.index]
        return Route(self.model, placement.device, decision.reason, self.token_count, placement.emulated)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request runs."""

    placement: Placement
    candidate: Candidate
    route: Route


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be done with a request now: a route, or the refusal; and how each placement looks."""

    demand: Demand
    candidates: Sequence[Candidate]
    route: Route | None
    refusal: NodeError | None


class Explained(Exception):
    """Raised in place of running a request that is a dry run."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__("a dry run ends where the placement is decided")
        self.explanation = explanation


def turn_away(placements: Sequence[Placement], units: int, context: RequestContext) -> None:
    """Raise Overloaded if every placement would refuse: asked before tokenizing, refusing costs next to nothing."""
    refusal: Overloaded | None = None
    for placement in placements:
        try:
            placement.admission.check(units, context.deadline, interactive=context.interactive)
        except Overloaded as error:
            refusal = refusal or error
        else:
            return
    if refusal is not None:
        raise refusal


def explain(demand: Demand) -> Explanation:
    """Decide as for a real request, but load and run nothing."""
    candidates = [placement.candidate() for placement in demand.placements]
    try:
        route = demand.route(demand.decide(candidates))
    except NodeError as refusal:
        return Explanation(demand, candidates, None, refusal)
    return Explanation(demand, candidates, route, None)


async def find_place(demand: Demand, context: RequestContext) -> Place:
    """Return the place for a request; if only an engine on demand can hold it, have that loaded and wait for it.

    Raises what `routing.choose` raises; ModelLoading also when the load is likely to outlast the deadline; Explained
    for a dry run.
    """
    if context.dry_run:
        raise Explained(explain(demand))
    while True:
        candidates = [placement.candidate() for placement in demand.placements]
        try:
            decision = demand.decide(candidates)
        except ModelLoading:
            placement = _loadable(demand, candidates)
            if placement is None:
                raise
            placement.engine.wake()
            if time.monotonic() + placement.expected_load_s() > context.deadline:
                raise
            await _settled(placement, context.deadline)
            continue
        return Place(demand.placements[decision.index], candidates[decision.index], demand.route(decision))


@contextmanager
def errors_of(route: Route) -> Iterator[None]:
    """Errors raised in the block know the model and the device of the route."""
    try:
        yield
    except NodeError as error:
        error.model, error.device = route.model, route.device.value
        raise


def _loadable(demand: Demand, candidates: Sequence[Candidate]) -> Placement | None:
    """The first placement that holds the request, is not loaded yet and is loaded on demand, or was unloaded."""
    for placement, candidate in zip(demand.placements, candidates, strict=True):
        if (
            (placement.on_demand or placement.engine.status.state is EngineState.UNLOADED)
            and candidate.obstacle == "model_loading"
            and demand.require in {None, candidate.device}
            and candidate.holds(demand.prompt_tokens, demand.max_new_tokens)
        ):
            return placement
    return None


async def _settled(placement: Placement, deadline: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await placement.engine.settled()
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed while the model was being loaded") from error
