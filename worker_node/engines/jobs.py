"""The jobs that an engine process holds: where their results go, and who is blamed if the process dies.

An engine may still compute a job whose caller has left or whose deadline has passed, because a native call cannot be
interrupted. If the process dies in that call, this job is to blame, not the jobs that waited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from worker_node.core.errors import EngineDied, NodeError, RequestBreaksEngine
from worker_node.engines.isolation import BY_ITSELF, Blame, Suspects, fingerprint
from worker_node.engines.protocol import EngineSpec, Event, Heartbeat, Job, NativeCall, Result, Results

# How many jobs are kept whose callers have left: only a flood leaves more within one run.
_MOST_LEFT = 64

# The results of one job, and the error that ended it; bounded by the results of one job.
JobQueue = asyncio.Queue[Result | NodeError]


class _Held(NamedTuple):
    """A job that the engine holds. The canary's is never `suspect`."""

    job: Job
    queue: JobQueue
    suspect: bool


class HeldJobs:
    """Jobs by id, each with the queue of its results. `blame` is set when the engine has ended."""

    def __init__(self, spec: EngineSpec, suspects: Suspects) -> None:
        self._spec = spec
        self._suspects = suspects
        self._jobs: dict[int, _Held] = {}
        self._left: dict[int, _Held] = {}
        self._call: NativeCall | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.blame: Blame = BY_ITSELF

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, queue: JobQueue, *, suspect: bool) -> None:
        """Record that the engine holds the job."""
        self._jobs[job.id] = _Held(job, queue, suspect)
        self._empty.clear()

    def fail(self, job_id: int, error: NodeError) -> None:
        """End one job with an error."""
        self._left.pop(job_id, None)
        if (held := self._take(job_id)) is not None:
            held.queue.put_nowait(error)

    def leave(self, job_id: int) -> bool:
        """Record that the caller of a job has left; return whether the engine still held the job."""
        held = self._take(job_id)
        if held is not None and held.suspect:
            self._left[job_id] = held
            if len(self._left) > _MOST_LEFT:
                named = () if self._call is None else self._call.jobs
                del self._left[next((other for other in self._left if other not in named), job_id)]
        return held is not None

    def received(self, events: Iterable[Event]) -> None:
        """Pass results to their jobs' queues, and follow what the engine works on."""
        for event in events:
            match event:
                case Results():
                    for result in event.results:
                        self._deliver(result)
                case NativeCall():
                    # Until the next one, the engine computes these jobs and no others.
                    self._call = event
                    if self._left:
                        self._left = {job_id: held for job_id, held in self._left.items() if job_id in event.jobs}
                case Heartbeat(idle=True):
                    self._left.clear()

    def _deliver(self, result: Result) -> None:
        """Results of jobs whose callers have left are dropped."""
        held = self._jobs.get(result.id)
        if result.last:
            self._left.pop(result.id, None)
            self._take(result.id)
        if held is None:
            return
        held.queue.put_nowait(result)
        if result.last and self._suspects:
            self._suspects.answered(fingerprint(held.job))

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._empty.wait()

    def end(self, error: NodeError) -> None:
        """Fail every job with an error for which no request is to blame."""
        jobs, self._jobs, self._left = self._jobs, {}, {}
        self._empty.set()
        for held in jobs.values():
            held.queue.put_nowait(error)

    def engine_died(self, reason: str, *, blameless: bool) -> None:
        """Fail every job. Unless `blameless`, record the jobs that may have caused the end, by the last native call."""
        jobs, self._jobs = self._jobs, {}
        left, self._left = self._left, {}
        self._empty.set()
        if not blameless:
            self._suspect(jobs | left)
        for held in jobs.values():
            held.queue.put_nowait(self._error_for(held, reason))

    def _take(self, job_id: int) -> _Held | None:
        held = self._jobs.pop(job_id, None)
        if not self._jobs:
            self._empty.set()
        return held

    def _suspect(self, jobs: dict[int, _Held]) -> None:
        """Suspect the jobs of the last native call, or all if it named none of them."""
        named = [] if self._call is None else [jobs[job_id] for job_id in self._call.jobs if job_id in jobs]
        suspects = {fingerprint(held.job) for held in named or jobs.values() if held.suspect}
        if suspects:  # else the canary's question alone was in the call
            self.blame = self._suspects.died(suspects)

    def _error_for(self, held: _Held, reason: str) -> NodeError:
        """The error of a job that was lost with the engine."""
        if held.suspect and self._suspects and self._suspects.refuses(fingerprint(held.job)):
            return RequestBreaksEngine(
                f"{self._spec.model_id} on {self._spec.device}: the request takes down the engine that runs it "
                f"({reason}); do not send it again"
            )
        return engine_died(self._spec, reason)


def engine_died(spec: EngineSpec, reason: str) -> EngineDied:
    """The error for a request that was lost with the engine and can be sent again."""
    return EngineDied(f"{spec.model_id} on {spec.device}: {reason}; the request can be sent again")
