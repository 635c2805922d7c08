"""Selects the placement that runs a request, waiting for its engine if necessary; or explains the selection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker_node.domain import RequestContext, Route
from worker_node.errors import DeadlineExceeded, NodeError, Overloaded
from worker_node.manager.placement import Placement
from worker_node.routing import Candidate
from worker_node.serving.verdict import Demand, Refused, RunsAt, Snapshot, WaitsFor, foresee, judge


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
    seen = Snapshot.of(demand.placements)
    verdict = judge(demand, seen, context, time.monotonic())
    refusal = verdict.error if isinstance(verdict, Refused) else None
    route = foresee(demand, seen, verdict)
    return Explanation(demand, seen.candidates, route, refusal, loads=isinstance(verdict, WaitsFor))


async def select_placement(demand: Demand, context: RequestContext, *, units: int = 1) -> Place:
    """Return the place for a request of so many `units` (see `AdmissionLimits`), loading an engine on demand for it.

    If no placement is up, waits for a restart that is likely to end in time; meanwhile the request takes places in the
    queue. Raises what `routing.choose` raises; ModelLoading also when the load is likely to outlast the deadline;
    Overloaded when too many wait; Explained for a dry run.
    """
    if context.dry_run:
        raise Explained(explain(demand, context))
    began, waited = time.monotonic(), False
    while True:
        seen = Snapshot.of(demand.placements)
        match judge(demand, seen, context, time.monotonic()):
            case RunsAt(decision):
                loading_s = time.monotonic() - began if waited else 0.0
                placement = demand.placements[decision.index]
                return Place(placement, seen.candidates[decision.index], demand.route(decision), loading_s)
            case Refused(error, loads):
                if loads is not None:
                    demand.placements[loads].wake()
                raise error
            case WaitsFor(index, loads=True):
                placement = demand.placements[index]
                placement.wake()
                await placement.settled(context.deadline, patient=context.wait_for_load)
            case WaitsFor(index):
                await _restart_of(demand.placements[index], demand, context, units, began)
        waited = True


async def _restart_of(placement: Placement, demand: Demand, context: RequestContext, units: int, began: float) -> None:
    """Wait until the state of an engine that is being restarted changes.

    Raises Overloaded, DeadlineExceeded, and the refusal of routing once the allowed wait is over.
    """
    by = context.restart_by(began)
    changed = placement.engine.next_change()
    try:
        with placement.admission.waiting(units, interactive=context.interactive):
            async with asyncio.timeout(max(0.0, by - time.monotonic())):
                await changed
    except TimeoutError as error:
        if by < context.deadline:
            demand.decide([placement.candidate() for placement in demand.placements])
        raise DeadlineExceeded("the deadline passed before the engine was started again") from error
    finally:
        changed.close()


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
