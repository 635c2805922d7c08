"""Runs a request again when its engine dies before any part of the answer was sent.

That is before the first token of a stream, and before the end of an answer that is sent as a whole. The request runs
again on the next placement, or on the same engine after its restart, as long as the deadline allows. A request that is
suspected of the engine's death runs alone, and one that kills an engine while alone on it twice is refused
(`engines.isolation`)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from worker_node.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDied,
    EngineUnavailable,
    NodeError,
    NpuNotProven,
    RequestBreaksEngine,
)
from worker_node.core.types import Device, RequestContext, Route, Timing
from worker_node.engines.isolation import fingerprint
from worker_node.engines.protocol import EngineState, Job, JobResult, R
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import Placement, first_change
from worker_node.manager.served import ServedModel
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import OFF, Operation, Tracing
from worker_node.registry import task_of
from worker_node.scheduling.admission import AdmissionLimits, Permit, Work
from worker_node.scheduling.routing import Candidate
from worker_node.serving.places import Demand, Place, errors_of, select_placement
from worker_node.serving.task import TaskParts

# A request that breaks its engine takes three: with others, and twice alone. More are for those that run when others
# break it.
MAX_RUNS = 6

_RETURNING = frozenset({EngineState.STARTING, EngineState.BACKING_OFF})


Admit = Callable[[Placement], AbstractContextManager[Permit]]


class Runs:
    """All runs of one admitted request: the first at `place`, each later one where `select_placement` puts it.

    `admit` admits it to a placement. `key` returns the request's digest, computed only if it is needed.
    """

    def __init__(self, demand: Demand, context: RequestContext, place: Place, admit: Admit) -> None:
        self._demand = demand
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

    def run(self, key: Callable[[], bytes]) -> AbstractAsyncContextManager[None]:
        """One run, at the current place. Entering raises RequestBreaksEngine, DeadlineExceeded, Overloaded."""
        placement = self.place.placement
        if placement is self._first and not self._suspected(key):
            return placement.isolation.use(self._context.deadline)
        return self._special_run(placement, key)

    @asynccontextmanager
    async def _special_run(self, placement: Placement, key: Callable[[], bytes]) -> AsyncIterator[None]:
        """A run of a suspect, or on another placement than the first."""
        suspected = self._suspected(key)
        self._refuse(key)
        with self._elsewhere(placement):
            async with placement.isolation.use(self._context.deadline, exclusive=suspected):
                self._refuse(key)  # another of its kind may have had its turn before
                yield

    def _refuse(self, key: Callable[[], bytes]) -> None:
        if self._suspected(key) and self.place.placement.suspects.refuses(key()):
            raise RequestBreaksEngine(
                f"{self._demand.model}: this request took down the engine that ran it, twice; do not send it again"
            )

    async def again(self, key: Callable[[], bytes], error: EngineUnavailable) -> None:
        """After the engine died in a run or before it: find the place for the next run, or raise `error`."""
        self._count += isinstance(error, EngineDied)
        # A caller with a proof of its own holds the device, which the canary of the restarted engine needs first.
        if self._context.own_proof or self._count >= MAX_RUNS:
            raise error
        suspected = self._suspected(key)
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

    def _suspected(self, key: Callable[[], bytes]) -> bool:
        suspects = self.place.placement.suspects
        return bool(suspects) and key() in suspects

    def _find(self, *, suspected: bool) -> Place | None:
        demand = self._demand
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
        for placement in self._demand.placements:
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
    while True:
        place = runs.place
        job = make_job(place)
        key = partial(fingerprint, job)
        yielded = False
        try:
            async with runs.run(key), aclosing(place.placement.engine.run(job, result)) as results:
                async for item in results:
                    yielded = True
                    yield item
                return
        except EngineUnavailable as error:
            if yielded and begin_anew is None:
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


# Required means proven: checks that the NPU worked for a request that requires it.

T = TypeVar("T")


@dataclass(slots=True)
class Proof:
    """Judges the NPU's busy time for one request.

    `strict` refuses a counter that cannot be read. `unread`: it could not be read, and the request passed.
    """

    route: Route
    required: bool
    strict: bool
    unread: bool = False

    @classmethod
    def of(cls, route: Route, context: RequestContext, *, strict: bool) -> Proof:
        """The proof that a request needs on its route."""
        required = context.require_device is Device.NPU and route.device is Device.NPU and not context.own_proof
        return cls(route, required, strict)

    def check(self, busy_us: int | None) -> None:
        """Raise NpuNotProven if the request requires the NPU and its busy time does not prove that the NPU ran it."""
        if not self.required:
            return
        what = f"{self.route.model}: the request requires the NPU, and"
        if busy_us is None:
            if self.strict:
                raise NpuNotProven(
                    f"{what} its busy counter cannot be read (/health says why); npu_require_proof = false lets it pass"
                )
            self.unread = True
        elif busy_us <= 0:
            raise NpuNotProven(f"{what} its busy counter did not move during the run; try again or examine the device")


async def after_first(events: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The same events, begun: what goes wrong before the first of them is raised here and now."""
    first = await anext(events, None)
    return _resumed(first, events)


async def _resumed(first: T | None, events: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    if first is not None:
        yield first
        async for event in events:
            yield event


# The parts of the node that requests of every task need.


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


# Run a job that has one result: route, admit, run, prove, measure.


class SingleResult(JobResult, Protocol):
    """The one result of a job. `started` is monotonic time, `inference_s` seconds on the device.

    `busy_us` is the NPU's busy time, None where there is no counter; `busy_shared`: others are known to have used the
    NPU too. Since its last result the engine computed `measured_tokens` tokens in `measured_s` seconds in which more
    work was waiting.
    """

    @property
    def started(self) -> float: ...
    @property
    def inference_s(self) -> float: ...
    @property
    def busy_us(self) -> int | None: ...
    @property
    def busy_shared(self) -> bool: ...
    @property
    def measured_tokens(self) -> int: ...
    @property
    def measured_s(self) -> float: ...


S = TypeVar("S", bound=SingleResult)


@dataclass(frozen=True, slots=True)
class Answer(Generic[S]):
    """A result with the route that it took in the end; the request waited `loading_s` seconds for its model."""

    result: S
    route: Route
    timing: Timing
    loading_s: float = 0.0


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
    work: Callable[[AdmissionLimits], Work]
    began: float
    prepared: float


async def run_single(services: Services, run: SingleRun[S], operation: Operation) -> Answer[S]:
    """Choose the placement, and run the job on it. Raises what `select_placement` and `run_placed` raise."""
    place = await select_placement(run.demand, run.context, units=run.units)
    operation.routed(place.route)
    return await run_placed(services, run, place, operation)


async def run_placed(services: Services, run: SingleRun[S], place: Place, operation: Operation) -> Answer[S]:
    """Run the job at its place, or elsewhere if the engine dies.

    Raises Overloaded, DeadlineExceeded, EngineUnavailable, RequestBreaksEngine, NpuNotProven.
    """
    context = run.context
    proof = Proof.of(place.route, context, strict=services.require_proof)

    def permit(placement: Placement) -> AbstractContextManager[Permit]:
        admission = placement.admission
        work = run.work(admission.limits)
        return admission.permit(run.units, context.deadline, work=work, interactive=context.interactive)

    runs = Runs(run.demand, context, place, permit)
    with errors_of(lambda: runs.place.route), runs.admitted() as runs.permit:
        operation.submitted(place.placement.engine)
        result = await run_for_one_result(runs, run.job, run.result)
        runs.permit.measured(result.measured_tokens, result.measured_s)
    route = runs.place.route
    operation.ran(result.started, result.started + result.inference_s)
    if proof.required:
        with errors_of(lambda: route):
            proof.check(result.busy_us)
    timing = Timing(
        queue=(result.started - run.prepared) * 1e3,
        tokenize=(run.prepared - run.began) * 1e3,
        inference=result.inference_s * 1e3,
        total=(time.monotonic() - context.arrived) * 1e3,
    )
    return Answer(result, replace(route, unproven=True) if proof.unread else route, timing, place.loading_s)


# Finds the model that a request names.

M = TypeVar("M", bound=ServedModel)


async def model_of(manager: ModelManager, kind: str, form: type[M], name: str | None, deadline: float) -> M:
    """The model of that name, or the default one of that kind; `form` is its class, `deadline` monotonic seconds.

    Raises ModelNotFound, BadRequest (a model of another kind; the message names one of the right kind), and what
    `ModelManager.resolve` raises.
    """
    model = await (manager.default(kind, deadline) if name is None else manager.resolve(name, deadline))
    if isinstance(model, form):
        return model
    suitable = ", ".join(other.id for other in manager.models if other.installed.kind == kind)
    instead = f"use one of these: {suitable}" if suitable else f"this node has no {kind} model: npu-node pull adds one"
    raise BadRequest(
        f"model {model.id} is for {task_of(model.installed.kind).verb}, not for {task_of(kind).verb}; {instead}",
        param="model",
    )
