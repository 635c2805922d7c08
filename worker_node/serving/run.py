"""Runs one request on the placement that was selected: admission, retries, and the proof that the NPU ran it.

`run_single` does all of it for a job with one result; a stream of results uses `Execution` itself, the only owner of
retries on the node. When an engine dies before any part of the answer was sent, the request runs on the next placement,
or on the same engine after its restart, as long as the deadline allows. A request that is suspected of an engine's
death, here or on another node, runs alone, and one that kills an engine while alone on it twice is refused
(`engines.isolation`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, Self, TypeVar, cast

from worker_node.core.errors import (
    EngineCrashed,
    EngineDied,
    EngineUnavailable,
    InsufficientMemory,
    NodeError,
    NpuNotProven,
    RequestBreaksEngine,
)
from worker_node.core.types import Busy, Device, RequestContext, Route, Timing
from worker_node.engines.isolation import fingerprint
from worker_node.engines.protocol import Job, JobResult, R, ResultStream
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import Placement
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import OFF, Operation, Tracing
from worker_node.scheduling.admission import AdmissionLimits, Permit, TokenCost
from worker_node.serving.routing import Demand, PlacementStatus, Selection, select_placement, wait_for_placement

T = TypeVar("T")
WorkOf = Callable[[AdmissionLimits], TokenCost]

# A request that breaks its engine takes three: with others, and twice alone. More are for those that run when others
# break it.
MAX_RUNS = 6


class TaskPart(Protocol):
    """A resource that must be closed when the node stops."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=TaskPart)


class TaskParts:
    """Resources of one task alone, such as a process that decodes audio: one of each kind, made on first use."""

    def __init__(self) -> None:
        self._parts: dict[Callable[[], TaskPart], TaskPart] = {}

    def of(self, make: Callable[[], P]) -> P:
        if make not in self._parts:
            self._parts[make] = make()
        return cast("P", self._parts[make])

    async def close(self) -> None:
        """Close all resources, even if closing one of them fails."""
        async with AsyncExitStack() as stack:
            while self._parts:
                stack.push_async_callback(self._parts.popitem()[1].close)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the node that requests of every task share.

    `require_proof`: requests that require the NPU are refused where its counter cannot be read.
    """

    manager: ModelManager
    telemetry: Telemetry
    tracing: Tracing = OFF
    parts: TaskParts = field(default_factory=TaskParts)
    require_proof: bool = False


class Execution:
    """An admitted request: each attempt runs at `selection`, which a retry may change.

        with Execution(demand, context, selection).admitted() as execution:
            while not execution.done:
                async with execution.attempt(job, result) as results:
                    ...

    It takes `units` places at admission; `work` is its cost on an engine, which may depend on the engine's limits. With
    `strict_proof` a request that requires the NPU is refused where the busy counter cannot be read.
    """

    def __init__(
        self,
        demand: Demand,
        context: RequestContext,
        selection: Selection,
        *,
        units: int = 1,
        work: TokenCost | WorkOf | None = None,
        strict_proof: bool = False,
    ) -> None:
        self.selection = selection
        # The current route, `unproven` where the busy counter could not be read.
        self.route = selection.route
        # Whether an attempt has ended without an error.
        self.done = False
        # Whether a part of the answer was sent, or surely will be: then no retry can take it back.
        self.sent = False
        # Whether the request stays on its device from now on, because a header names it.
        self.pinned = False
        self.permit: Permit
        # Whether the busy time must prove that the NPU ran it.
        on_npu = context.require_device is Device.NPU and selection.route.device is Device.NPU
        self.proof_required = on_npu and not context.own_proof
        self._strict_proof = strict_proof
        self._permits: dict[Device, Permit] = {}
        self._demand = demand
        self._context = context
        self._units = units
        self._work = work
        self._first = selection.placement
        self._deaths = 0

    @contextmanager
    def admitted(self) -> Iterator[Self]:
        """Be admitted to the first placement while the block runs, retries included. Entering raises Overloaded."""
        try:
            self.permit = self._permit_at(self._first)
        except NodeError as error:
            self._name_route(error)
            raise
        try:
            yield self
        finally:
            for permit in self._permits.values():
                permit.__exit__()

    def _name_route(self, error: NodeError) -> None:
        """Add the model and the device of the current route: a stream renders errors where they are raised."""
        error.model, error.device = self.route.model, self.route.device.value

    def prove(self, busy: Busy) -> None:
        """Raise NpuNotProven if the request requires the NPU and its busy time does not prove that the NPU ran it."""
        if not self.proof_required or (busy.us or 0) > 0:
            return
        if busy.us is None and not self._strict_proof:
            self.route = replace(self.route, unproven=True)
            return
        problem = "did not move during the run; try again or examine the device"
        if busy.us is None:
            problem = "cannot be read (/health says why); npu_require_proof = false lets it pass"
        error = NpuNotProven(f"{self.route.model}: the request requires the NPU, and its busy counter {problem}")
        self._name_route(error)
        raise error

    @asynccontextmanager
    async def attempt(self, job: Job, result: type[R]) -> AsyncIterator[ResultStream[R]]:
        """Run the job once; the block reads its results as those of `Engine.run`, which is left with the block.

        If the engine dies before anything was `sent`, the block ends without an error, `done` stays false, and
        the next attempt has a placement. So it does if the device was recovered while the job ran: then neither the
        result nor the device's busy time proves anything. Raises RequestBreaksEngine, DeadlineExceeded, Overloaded,
        EngineUnavailable.
        """
        # The request's digest is computed only if it is needed.
        key = partial(fingerprint, job)
        placement = self.selection.placement
        engine = placement.engine
        try:
            try:
                alone_s = 0.0
                if placement.suspects or self._context.engine_deaths:
                    self._refuse(key)
                    alone_s = self._time_alone(key)
                async with placement.isolation.use(self._context.deadline, alone_s=alone_s) as waited:
                    if waited:
                        self._refuse(key)  # another of its kind may have had its turn before
                    recoveries = engine.recoveries
                    try:
                        async with aclosing(engine.run(job, result)) as results:
                            yield results
                    finally:
                        placement.used_at = placement.clock()
                    if engine.recoveries != recoveries:
                        raise EngineDied(
                            f"{self._demand.model} on {placement.device}: the kernel recovered the device while the "
                            "request ran, so its result is not used; the request can be sent again"
                        )
                self.done = True
            except EngineUnavailable as error:
                if self.sent:
                    raise
                await self._select_next(key, error)
        except NodeError as error:
            self._name_route(error)
            raise

    def _permit_at(self, placement: Placement) -> Permit:
        if placement.device not in self._permits:
            admission, context = placement.admission, self._context
            work = self._work(admission.limits) if callable(self._work) else self._work
            permit = admission.permit(self._units, context.deadline, work=work, interactive=context.interactive)
            self._permits[placement.device] = permit.__enter__()
        return self._permits[placement.device]

    def _time_alone(self, key: Callable[[], bytes]) -> float:
        """For how many seconds it must run alone; 0 unless an engine died under it, here or on another node."""
        suspects = self.selection.placement.suspects
        elsewhere = suspects.alone_s if self._context.engine_deaths else 0.0
        return max(elsewhere, suspects.time_alone(key()) if suspects else 0.0)

    def _refuse(self, key: Callable[[], bytes]) -> None:
        suspects = self.selection.placement.suspects
        if suspects and suspects.refuses(key()):
            raise RequestBreaksEngine(
                f"{self._demand.model}: this request took down the engine that ran it, twice; do not send it again"
            )

    async def _select_next(self, key: Callable[[], bytes], error: EngineUnavailable) -> None:
        """Select the placement of the next attempt, after the engine died in one or before it; or raise `error`."""
        self._deaths += isinstance(error, EngineDied)
        # The client sends it nowhere then.
        broke_two = isinstance(error, EngineCrashed) and self._context.engine_deaths > 0
        # A caller with a proof of its own holds the device, which the canary of the restarted engine needs first.
        if broke_two or self._context.own_proof or self._deaths >= MAX_RUNS:
            raise error
        demand = replace(self._demand, require=self.route.device) if self.pinned else self._demand
        own = self.selection.placement
        suspected = self._time_alone(key) > 0

        def status_of(placement: Placement) -> PlacementStatus:
            status = PlacementStatus.of(placement)
            busy = placement is not own and placement.engine.status.in_flight > 0
            if suspected and busy and own.ready_in() is not None:
                # What it may do to its own engine it must not do to others at work.
                return replace(status, obstacle="device_unavailable")
            return status

        try:
            decision, _ = await wait_for_placement(demand, self._context, status_of, units=0)
        except InsufficientMemory:
            raise error from None
        if decision.error is not None:
            raise error
        route = decision.route(demand)
        if self.pinned:
            route = replace(route, reason=self.route.reason)
        self.selection = Selection(demand.placements[decision.index], route)
        self.route = replace(route, unproven=self.route.unproven)
        self.permit = self._permit_at(self.selection.placement)


class SingleResult(JobResult, Protocol):
    """The one result of a job. `started` is monotonic time, `inference_s` seconds on the device.

    Since its last result the engine computed `measured_tokens` tokens in `measured_s` seconds in which more
    work was waiting.
    """

    @property
    def started(self) -> float: ...
    @property
    def inference_s(self) -> float: ...
    @property
    def busy(self) -> Busy: ...
    @property
    def measured_tokens(self) -> int: ...
    @property
    def measured_s(self) -> float: ...


S = TypeVar("S", bound=SingleResult)


@dataclass(frozen=True, slots=True)
class RoutedResult(Generic[S]):
    """A result with the route that it took in the end."""

    result: S
    route: Route
    timing: Timing


@dataclass(frozen=True, slots=True)
class SingleRun(Generic[S]):
    """What to run: `job` with a result of type `result`, on a placement that meets `demand`.

    It takes `units` places at admission; `work` returns its cost on an engine. The request was prepared between `began`
    and `prepared` (monotonic).
    """

    demand: Demand
    context: RequestContext
    job: Job
    result: type[S]
    units: int
    work: WorkOf
    began: float
    prepared: float


async def run_single(services: Services, run: SingleRun[S], operation: Operation) -> RoutedResult[S]:
    selection = await select_placement(run.demand, run.context, units=run.units)
    operation.routed(selection.route)
    return await run_selected(services, run, selection, operation)


async def run_selected(
    services: Services, run: SingleRun[S], selection: Selection, operation: Operation
) -> RoutedResult[S]:
    """Run the job on the selected placement, or elsewhere if the engine dies. Raises as `Execution.attempt`."""
    context = run.context
    execution = Execution(
        run.demand, context, selection, units=run.units, work=run.work, strict_proof=services.require_proof
    )
    with execution.admitted():
        operation.submitted(selection.placement.engine)
        while not execution.done:
            async with execution.attempt(run.job, run.result) as results:
                result = await anext(aiter(results))
        execution.permit.measured(result.measured_tokens, result.measured_s)
        operation.begin("engine", result.started)
        operation.begin("", result.started + result.inference_s)
        execution.prove(result.busy)
    timing = Timing(
        queue=(result.started - run.prepared) * 1e3,
        tokenize=(run.prepared - run.began) * 1e3,
        inference=result.inference_s * 1e3,
        total=(time.monotonic() - context.arrived) * 1e3,
    )
    return RoutedResult(result, execution.route, timing)
