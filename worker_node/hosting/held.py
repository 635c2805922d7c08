"""The jobs that an engine process holds, and the error that each gets when the process dies.

An engine may still compute a job whose caller has left or whose deadline has passed, because a native call cannot be
interrupted. If the process dies in that call, this job is to blame, not the jobs that waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from worker_node.core.errors import EngineDied, NodeError, RequestBreaksEngine
from worker_node.engines.messages import EngineSpec, Heartbeat, Job, NativeCall, Result
from worker_node.hosting.sinks import JobSink
from worker_node.hosting.suspicion import BY_ITSELF, OnBoard, Standing, Suspects, fingerprint

# So long after its caller has left the engine surely knows it, if its loop turns.
_KNOWN_S = 1.0
# How many jobs are kept whose callers have left: only a flood leaves more within one run.
_MOST_LEFT = 64


@dataclass(slots=True)
class _Held:
    """A job that the engine holds; `fresh` until something has come of it. The canary's is never `suspect`.

    `left` is when its caller left, in monotonic seconds.
    """

    job: Job
    sink: JobSink
    suspect: bool
    fresh: bool = True
    left: float = 0.0


class HeldJobs:
    """Jobs by id, each with the sink of its results.

    `blame` is set when the engine has ended. `ended` is called with the id of each job that a living engine
    no longer holds.
    """

    def __init__(
        self, spec: EngineSpec, suspects: Suspects, ended: Callable[[int], object] = lambda _job_id: None
    ) -> None:
        self._spec = spec
        self._ended = ended
        self._suspects = suspects
        self._jobs: dict[int, _Held] = {}
        self._left: dict[int, _Held] = {}
        self._call: NativeCall | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.blame = BY_ITSELF

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, sink: JobSink, *, suspect: bool) -> None:
        """Record that the engine holds the job."""
        self._jobs[job.id] = _Held(job, sink, suspect)
        self._idle.clear()

    def release(self, job_id: int) -> JobSink | None:
        """Forget a job that has ended; return its sink, or None if its caller has left."""
        self._left.pop(job_id, None)
        held = self._take(job_id)
        return None if held is None else held.sink

    def leave(self, job_id: int, now: float) -> bool:
        """Record that the caller of a job has left; return whether the engine still held the job."""
        held = self._take(job_id)
        if held is not None and held.suspect:
            held.left = now
            self._left[job_id] = held
            if len(self._left) > _MOST_LEFT:
                named = () if self._call is None else self._call.jobs
                del self._left[next((other for other in self._left if other not in named), job_id)]
        return held is not None

    def called(self, call: NativeCall) -> None:
        """Record a native call: until the next one, the engine computes these jobs and no others."""
        self._call = call
        if self._left:
            self._left = {job_id: held for job_id, held in self._left.items() if job_id in call.jobs}

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """What the engine works on was begun after the callers of some had left: it is not for these."""
        if not self._left:
            return
        oldest = heartbeat.stats.oldest_run
        if heartbeat.idle or oldest is not None:
            began = now if oldest is None else now - oldest[1]
            self._left = {job_id: held for job_id, held in self._left.items() if held.left + _KNOWN_S >= began}

    def _take(self, job_id: int) -> _Held | None:
        held = self._jobs.pop(job_id, None)
        if not self._jobs:
            self._idle.set()
        if held is not None:
            self._ended(job_id)
        return held

    def deliver(self, result: Result) -> None:
        """Pass a result to its job's sink; results of jobs whose callers have left are dropped."""
        held = self._jobs.get(result.id)
        if held is None:
            if result.last:
                self._left.pop(result.id, None)
            return
        if result.last:
            self.release(result.id)
        held.fresh = False
        held.sink.put(result)
        if result.last and self._suspects:
            self._suspects.answered(fingerprint(held.job))

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._idle.wait()

    def end(self, error: NodeError) -> None:
        """Fail every job with an error for which no request is to blame."""
        jobs, self._jobs, self._left = self._jobs, {}, {}
        self._idle.set()
        for held in jobs.values():
            held.sink.put(error)

    def engine_died(self, reason: str, *, blameless: bool) -> None:
        """Fail every job. Unless `blameless`, record the jobs that may have caused the end, by the last native call."""
        jobs, self._jobs = self._jobs, {}
        left, self._left = self._left, {}
        self._idle.set()
        if not blameless:
            self._suspect(jobs | left)
        for held in jobs.values():
            held.sink.put(self._fate(held, reason))

    def _suspect(self, jobs: dict[int, _Held]) -> None:
        call, held_jobs = self._call, jobs
        jobs = {job_id: held for job_id, held in jobs.items() if held.suspect}
        examined = call is not None and all(job_id in held_jobs and job_id not in jobs for job_id in call.jobs)
        if not jobs or examined:  # only the canary's question was in the call
            return
        keys = {job_id: fingerprint(held.job) for job_id, held in jobs.items()}
        self.blame = self._suspects.died(
            [OnBoard(keys[job_id], held.fresh) for job_id, held in jobs.items()],
            {keys[job_id] for job_id in call.jobs if job_id in keys} if call else (),
            preparing=call is not None and call.stage == "prepare" and any(job_id in keys for job_id in call.jobs),
        )

    def _fate(self, held: _Held, reason: str) -> NodeError:
        """The error of a job that was lost with the engine."""
        if held.suspect and self._suspects and self._suspects.standing(fingerprint(held.job)) is Standing.REFUSED:
            return RequestBreaksEngine(
                f"{self._spec.model_id} on {self._spec.device}: the request takes down the engine that runs it "
                f"({reason}); do not send it again"
            )
        return engine_died(self._spec, reason)


def engine_died(spec: EngineSpec, reason: str) -> EngineDied:
    """The error for a request that was lost with the engine and can be sent again."""
    return EngineDied(f"{spec.model_id} on {spec.device}: {reason}; the request can be sent again")
