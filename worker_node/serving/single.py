"""Run a job that has one result: route, admit, run, prove, measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from worker_node.core.types import RequestContext, Route, Timing
from worker_node.engines.protocol import Job, JobResult
from worker_node.manager.placement import Placement
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import AdmissionLimits, Permit, Work
from worker_node.serving.places import Place, errors_of, select_placement
from worker_node.serving.proof import Proof
from worker_node.serving.rerun import Runs, run_for_one_result
from worker_node.serving.services import Services
from worker_node.serving.verdict import Demand


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
