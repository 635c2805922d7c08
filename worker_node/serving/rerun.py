"""Runs a request again when its engine dies before any part of the answer was sent.

That is before the first token of a stream, and before the end of an answer that is sent as a whole. The request runs
again on the next placement, or on the same engine after its restart, as long as the deadline allows. A request that is
suspected of the engine's death runs apart from others (`hosting.isolation`), and one that twice kills an engine that it
has to itself is refused (`hosting.suspicion`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from functools import partial

from worker_node.domain import RequestContext, Route
from worker_node.engines.base import EngineState, R, ResultStream
from worker_node.engines.messages import Job
from worker_node.errors import DeadlineExceeded, EngineDied, EngineUnavailable, NodeError, RequestBreaksEngine
from worker_node.hosting.suspicion import Standing, fingerprint
from worker_node.hosting.trials import Visit
from worker_node.manager.placement import Placement, first_change
from worker_node.routing import Candidate
from worker_node.scheduling.admission import Permit
from worker_node.serving.places import Place
from worker_node.serving.verdict import Demand

# A request that breaks its engine takes six: with others, in three groups, and twice alone. More are for those that
# were on board when others did.
MAX_RUNS = 12
# Of an answer that was under way, each run costs all of it. One that breaks its engine late takes five, two take seven.
MOST_BEGUN = 8

_RETURNING = frozenset({EngineState.STARTING, EngineState.BACKING_OFF})


Admit = Callable[[Placement], AbstractContextManager[Permit]]


class Runs:
    """All runs of one admitted request: the first at `place`, each later one where `select_placement` puts it.

    `admit` admits it to a placement. `key` returns the request's digest, computed only if it is needed.
    """

    def __init__(self, demand: Demand, context: RequestContext, place: Place, admit: Admit) -> None:
        self.demand = demand
        self._context = context
        self._admit = admit
        self._first = place.placement
        self._count = 0
        self._device_told = False
        self.place = place
        self.permit: Permit

    def tell_device(self) -> Route:
        """Fix the device and return the route, for the head of a stream: the request stays on this device."""
        self._device_told = True
        return self.place.route

    def run(self, key: Callable[[], bytes]) -> AbstractAsyncContextManager[Visit]:
        """One run, at the current place. Entering raises RequestBreaksEngine, DeadlineExceeded, Overloaded."""
        placement = self.place.placement
        standing = self._standing(key)
        if standing is Standing.CLEAR and placement is self._first:
            return placement.isolation.visit(standing, self._context.deadline)
        return self._special_run(placement, standing, key)

    @asynccontextmanager
    async def _special_run(
        self, placement: Placement, standing: Standing, key: Callable[[], bytes]
    ) -> AsyncIterator[Visit]:
        """A run of a suspect, or on another placement than the first."""
        if standing is Standing.REFUSED:
            raise RequestBreaksEngine(
                f"{self.demand.model}: this request took down the engine that ran it, twice; do not send it again"
            )
        with self._elsewhere(placement):
            suspects, deadline = placement.suspects, self._context.deadline
            company = suspects.company(key()) if standing is Standing.SUSPECT else 1
            thorough = standing is not Standing.CLEAR and suspects.thorough(key())
            async with placement.isolation.visit(standing, deadline, company, thorough=thorough) as visit:
                yield visit

    async def again(self, key: Callable[[], bytes], error: EngineUnavailable) -> None:
        """After the engine died in a run or before it: find the place for the next run, or raise `error`."""
        self._count += isinstance(error, EngineDied)
        # A caller with a proof of its own holds the device, which the canary of the restarted engine needs first.
        if self._context.own_proof or self._count >= MAX_RUNS:
            raise error
        suspected = self._standing(key) is not Standing.CLEAR
        with ExitStack() as stack:
            if suspected:
                placement = self.place.placement
                stack.enter_context(placement.isolation.reserved(placement.suspects.company(key())))
            while (place := self._find(suspected=suspected)) is None:
                returning = self._returning()
                if not returning:
                    raise error
                if not await first_change(returning, self._context.deadline):
                    raise DeadlineExceeded("the deadline passed before the engine was started again") from error
            self.place = place

    def admitted(self) -> AbstractContextManager[Permit]:
        """Be admitted to the first placement while the block runs, other runs included; its permit is for `permit`.

        Entering raises Overloaded.
        """
        return self._admit(self._first)

    @contextmanager
    def _elsewhere(self, placement: Placement) -> Iterator[None]:
        """Admission to another placement than the first."""
        if placement is self._first:
            yield
            return
        first = self.permit
        with self._admit(placement) as permit:
            self.permit = permit
            try:
                yield
            finally:
                self.permit = first

    def _standing(self, key: Callable[[], bytes]) -> Standing:
        suspects = self.place.placement.suspects
        return suspects.standing(key()) if suspects else Standing.CLEAR

    def _find(self, *, suspected: bool) -> Place | None:
        demand = self.demand
        if self._device_told:
            demand = replace(demand, require=self.place.route.device)
        candidates = [self._candidate(placement, suspected=suspected) for placement in demand.placements]
        try:
            decision = demand.decide(candidates)
        except NodeError:
            return None
        route = demand.route(decision)
        if self._device_told:
            route = replace(route, reason=self.place.route.reason)
        return Place(demand.placements[decision.index], candidates[decision.index], route)

    def _candidate(self, placement: Placement, *, suspected: bool) -> Candidate:
        candidate = placement.candidate()
        busy = placement is not self.place.placement and placement.engine.status.in_flight > 0
        if suspected and busy and candidate.obstacle is None and self._returning():
            # What it may do to its own engine it must not do to others at work.
            return replace(candidate, obstacle="device_unavailable")
        return candidate

    def _returning(self) -> list[Placement]:
        """The placements whose engine is started again in time."""
        now = time.monotonic()
        found = []
        for placement in self.demand.placements:
            status = placement.engine.status
            if self._device_told and placement.device is not self.place.route.device:
                continue
            if status.state in _RETURNING and now + (status.retry_after or 0.0) < self._context.deadline:
                found.append(placement)
        return found


async def run_again(
    runs: Runs, make_job: Callable[[Place], Job], result: type[R], begin_anew: Callable[[], None] | None = None
) -> AsyncGenerator[R, None]:
    """Yield a job's results as `Engine.run` does, over as many runs as it takes until the first result.

    With `begin_anew` over as many as it takes until the last one: when that is called the results so far are void.
    """
    begun = 0
    while True:
        place = runs.place
        job = make_job(place)
        key = partial(fingerprint, job)
        yielded = False
        try:
            async with runs.run(key) as visit, aclosing(place.placement.engine.run(job, result)) as results:
                source = _held_back(results, place, visit) if visit.apart else results
                async with aclosing(source):
                    async for item in source:
                        yielded = True
                        yield item
                return
        except EngineUnavailable as error:
            begun += yielded
            if yielded and (begin_anew is None or begun >= MOST_BEGUN):
                raise
            await runs.again(key, error)
            if yielded and begin_anew is not None:
                runs.permit.restarted()
                begin_anew()


async def run_for_one_result(runs: Runs, job: Job, result: type[R]) -> R:
    """Return the one result of a job, over as many runs as it takes."""
    key = partial(fingerprint, job)
    while True:
        try:
            async with runs.run(key), aclosing(runs.place.placement.engine.run(job, result)) as results:
                return await anext(results)
        except EngineUnavailable as error:
            await runs.again(key, error)


async def _held_back(results: ResultStream[R], place: Place, visit: Visit) -> AsyncGenerator[R, None]:
    """The results of a suspect, from when no other suspect can take its engine down: until then it can be run again."""
    isolation, held = place.placement.isolation, list[R]()
    async for item in results:
        if item.last or not (held or visit.thorough):
            isolation.harmless(visit)
        held.append(item)
        # The prime suspect is alone anyway.
        if item.last or visit.standing is Standing.PRIME or not isolation.trials_go_on:
            break
    for item in held:
        yield item
    async for item in results:
        yield item
