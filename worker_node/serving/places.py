"""The decision for a request in the state that the placements are in now. Pure, so an explanation is the decision.

A request runs at once, waits for an engine that is being loaded or restarted, or is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from worker_node.core.errors import (
    DeadlineExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    InsufficientMemory,
    ModelLoading,
    NodeError,
    Overloaded,
)
from worker_node.core.types import Device, RequestContext, Route
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import Placement, first_change
from worker_node.scheduling.routing import NOTHING, Candidate, Decision, Feature, choose


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a request that routing must know.

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
        """The decision as replies report it."""
        placement = self.placements[decision.index]
        return Route(
            self.model,
            placement.device,
            decision.reason,
            self.token_count,
            placement.emulated,
            parts=placement.parts,
        )

    def suits(self, candidate: Candidate) -> bool:
        """Whether the placement could run it if its engine were up."""
        return self.require in {None, candidate.device} and candidate.suits(
            self.prompt_tokens, self.min_new_tokens, self.needs
        )


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """A request waits for the placement at `index` until `until`; the one at `loads`, which it prefers, is loaded."""

    index: int
    until: float
    loads: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is refused; the placement at `loads` is loaded nevertheless, for requests with more time."""

    error: NodeError
    loads: int | None = None


Verdict = Decision | WaitsFor | Refused


def judge(
    demand: Demand,
    candidates: Sequence[Candidate],
    context: RequestContext,
    *,
    began: float,
    now: float,
    first: int = 0,
) -> Verdict:
    """Decide at the monotonic time `now` for a request that has waited since `began`.

    Where no placement is ready, it waits for the first that is likely to be in time, however that comes to be ready.
    One that waits for that at `first` does not go back to an earlier one until that is ready.
    """
    try:
        return demand.decide(candidates)
    except (ModelLoading, EngineUnavailable, DeviceUnavailable) as error:
        refusal: NodeError = error
    except NodeError as error:
        return Refused(error)
    loads: int | None = None
    for index, candidate in enumerate(candidates):
        if index < first or candidate.ready_in is None or not demand.suits(candidate):
            continue
        if loads is None and candidate.obstacle == "model_loading":
            loads = index
        if candidate.shortage is None:
            until = context.deadline if candidate.on_request else context.restart_by(began)
            if now + candidate.ready_in <= until:
                return WaitsFor(index, until, loads)
        else:
            # Others become idle nobody knows when: it waits as long as the load could still end in time.
            until = min(context.restart_by(began), context.deadline - candidate.ready_in)
            if now < until:
                return WaitsFor(index, until, loads)
            refusal = InsufficientMemory(candidate.shortage)
    return Refused(refusal, loads)


# Selects the placement that runs a request, waiting for its engine if necessary; or explains the selection.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request runs, and how many seconds it waited for the engine to be loaded or restarted."""

    placement: Placement
    candidate: Candidate
    route: Route
    loading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision for a request now: a route or a refusal, and the state of each placement.

    `loads`: the request would first wait for the engine of its route to be loaded or restarted.
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


def reject_if_full(placements: Sequence[Placement], units: int, context: RequestContext) -> None:
    """Raise Overloaded if every placement would refuse. Called before tokenizing, so that a refusal costs little."""
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
    """Decide as for a real request, but load and run nothing: an engine that would be waited for counts as ready."""
    candidates, now = _candidates(demand), time.monotonic()
    verdict = judge(demand, candidates, context, began=now, now=now)
    if isinstance(verdict, Refused):
        return Explanation(demand, candidates, None, verdict.error)
    if isinstance(verdict, Decision):
        return Explanation(demand, candidates, demand.route(verdict), None)
    ready = [replace(c, obstacle=None) if i == verdict.index else c for i, c in enumerate(candidates)]
    return Explanation(demand, candidates, demand.route(demand.decide(ready)), None, loads=True)


async def select_placement(demand: Demand, context: RequestContext, *, units: int = 1) -> Place:
    """Return the place for a request of so many `units` (see `AdmissionLimits`).

    If no placement is ready, it has one loaded and waits for the first that is likely to be ready in time; meanwhile
    the request takes places in the queue. Raises what `routing.choose` raises; ModelLoading also when the load is
    likely to outlast the deadline; InsufficientMemory; DeadlineExceeded; Overloaded when too many wait; Explained for a
    dry run.
    """
    if context.dry_run:
        raise Explained(explain(demand, context))
    clock = demand.placements[0].residency.clock
    began, waited = clock(), False
    verdict = judge(demand, _candidates(demand), context, began=began, now=began)
    while isinstance(verdict, WaitsFor):
        verdict, waited = await _wait(verdict, demand, context, units, began), True
    if isinstance(verdict, Refused):
        _load(demand, verdict.loads)
        raise verdict.error
    placement = demand.placements[verdict.index]
    loading_s = clock() - began if waited else 0.0
    return Place(placement, placement.candidate(), demand.route(verdict), loading_s)


async def _wait(verdict: WaitsFor, demand: Demand, context: RequestContext, units: int, began: float) -> Verdict:
    """Wait for a placement until the verdict is another one; return that.

    Raises Overloaded, InsufficientMemory, DeadlineExceeded.
    """
    index, latest = verdict.index, verdict
    placement = demand.placements[index]
    with (
        placement.admission.waiting(units, interactive=context.interactive),
        # A caller who can go elsewhere does not wait for memory.
        placement.awaited(patient=context.restart_wait_s != 0.0),
    ):
        # Only once: where memory does not hold it beside the other one, each further try would be refused, too.
        _load(demand, verdict.loads)
        while True:
            _load(demand, index)
            if not await first_change(demand.placements, latest.until) and latest.until == context.deadline:
                raise DeadlineExceeded("the deadline passed before the model was ready")
            placement.raise_refusal()
            now = placement.residency.clock()
            another = judge(demand, _candidates(demand), context, began=began, now=now, first=index)
            if not isinstance(another, WaitsFor) or another.index != index:
                return another
            latest = another


def _candidates(demand: Demand) -> list[Candidate]:
    return [placement.candidate() for placement in demand.placements]


def _load(demand: Demand, index: int | None) -> None:
    """Have the placement loaded, unless its load was requested before."""
    if index is not None and demand.placements[index].state is EngineState.UNLOADED:
        demand.placements[index].wake()


class errors_of:  # noqa: N801  (used as a function is; a class and not a generator, since every request makes two)
    """Adds the model and the device of the current route to errors raised in the block."""

    __slots__ = ("_route",)

    def __init__(self, route: Callable[[], Route]) -> None:
        self._route = route

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, NodeError):
            route = self._route()
            error.model, error.device = route.model, route.device.value
