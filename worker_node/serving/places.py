"""From what a request needs to the placement that runs it, loading one on demand; or only to the explanation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from worker_node.domain import Device, RequestContext, Route
from worker_node.errors import ModelLoading, NodeError, Overloaded
from worker_node.manager.placement import Placement
from worker_node.routing import NOTHING, Candidate, Decision, Feature, choose


@dataclass(frozen=True, slots=True)
class Demand:
    """What routing must know of a request.

    `prompt_tokens` is its longest prompt, `token_count` all of its tokens; the answer needs room for `min_new_tokens`.
    """

    model: str
    placements: Sequence[Placement]
    prompt_tokens: int
    token_count: int
    min_new_tokens: int = 0
    require: Device | None = None
    needs: frozenset[Feature] = NOTHING

    def decide(self, candidates: Sequence[Candidate]) -> Decision:
        """See `routing.choose`."""
        return choose(
            self.model,
            candidates,
            prompt_tokens=self.prompt_tokens,
            min_new_tokens=self.min_new_tokens,
            needs=self.needs,
            require=self.require,
        )

    def route(self, decision: Decision) -> Route:
        """The decision as replies tell it."""
        placement = self.placements[decision.index]
        return Route(self.model, placement.device, decision.reason, self.token_count, placement.emulated)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request runs, and how many seconds it waited for the engine to be loaded."""

    placement: Placement
    candidate: Candidate
    route: Route
    loading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be done with a request now: a route, or the refusal; and how each placement looks.

    `loads`: the request would first wait for the engine of its route to be loaded.
    """

    demand: Demand
    candidates: Sequence[Candidate]
    route: Route | None
    refusal: NodeError | None
    loads: bool = False


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


def explain(demand: Demand, context: RequestContext) -> Explanation:
    """Decide as for a real request, but load and run nothing: a load that would be waited for counts as done."""
    candidates = [placement.candidate() for placement in demand.placements]
    try:
        try:
            return Explanation(demand, candidates, demand.route(demand.decide(candidates)), None)
        except ModelLoading:
            index = _loadable(demand, candidates, context)
            if index is None or not _in_time(demand.placements[index], context):
                raise
        loaded = [replace(c, obstacle=None) if i == index else c for i, c in enumerate(candidates)]
        return Explanation(demand, candidates, demand.route(demand.decide(loaded)), None, loads=True)
    except NodeError as refusal:
        return Explanation(demand, candidates, None, refusal)


async def find_place(demand: Demand, context: RequestContext) -> Place:
    """Return the place for a request; if only an engine on demand can run it, have that loaded and wait for it.

    Raises what `routing.choose` raises; ModelLoading also when the load is likely to outlast the deadline; Explained
    for a dry run.
    """
    if context.dry_run:
        raise Explained(explain(demand, context))
    began, waited = time.monotonic(), False
    while True:
        candidates = [placement.candidate() for placement in demand.placements]
        try:
            decision = demand.decide(candidates)
        except ModelLoading:
            index = _loadable(demand, candidates, context)
            if index is None:
                raise
            placement = demand.placements[index]
            placement.wake()
            if not _in_time(placement, context):
                raise
            await placement.settled(context.deadline, patient=context.wait_for_load)
            waited = True
            continue
        return Place(
            demand.placements[decision.index],
            candidates[decision.index],
            demand.route(decision),
            time.monotonic() - began if waited else 0.0,
        )


@contextmanager
def errors_of(route: Callable[[], Route]) -> Iterator[None]:
    """Errors raised in the block know the model and the device of the route as it is then."""
    try:
        yield
    except NodeError as error:
        error.model, error.device = route().model, route().device.value
        raise


def _loadable(demand: Demand, candidates: Sequence[Candidate], context: RequestContext) -> int | None:
    """The first placement that suits the request, is not loaded yet and is waited for: see `wait_for_load`.

    One whose engine is being replaced is always waited for: it would serve if we had left it alone.
    """
    for index, (placement, candidate) in enumerate(zip(demand.placements, candidates, strict=True)):
        if (
            (placement.awaited or context.wait_for_load)
            and candidate.obstacle == "model_loading"
            and demand.require in {None, candidate.device}
            and candidate.suits(demand.prompt_tokens, demand.min_new_tokens, demand.needs)
        ):
            return index
    return None


def _in_time(placement: Placement, context: RequestContext) -> bool:
    """Whether a load is likely to end before the deadline."""
    return time.monotonic() + placement.expected_load_s() <= context.deadline
