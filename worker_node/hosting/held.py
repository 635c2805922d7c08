"""The jobs that an engine process holds, and what each is told when the process dies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from worker_node.engines.messages import EngineSpec, Job, NativeCall, Result
from worker_node.errors import EngineDied, NodeError, RequestBreaksEngine
from worker_node.hosting.sinks import JobSink
from worker_node.hosting.suspicion import BY_ITSELF, OnBoard, Standing, Suspects, fingerprint


@dataclass(slots=True)
class _Held:
    """A job that the engine holds; `fresh` until something has come of it. The canary's is never `suspect`."""

    job: Job
    sink: JobSink
    suspect: bool
    fresh: bool = True


class HeldJobs:
    """Jobs by id, each with the sink of its results. `blame` is known when the engine has ended."""

    def __init__(self, spec: EngineSpec, suspects: Suspects) -> None:
        self._spec = spec
        self._suspects = suspects
        self._jobs: dict[int, _Held] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.blame = BY_ITSELF

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, sink: JobSink, *, suspect: bool) -> None:
        """The engine has the job from now on."""
        self._jobs[job.id] = _Held(job, sink, suspect)
        self._idle.clear()

    def release(self, job_id: int) -> JobSink | None:
        """Forget a job; returns its sink, None if the engine does not hold it."""
        held = self._jobs.pop(job_id, None)
        if not self._jobs:
            self._idle.set()
        return None if held is None else held.sink

    def deliver(self, result: Result) -> None:
        """Pass a result to its job's sink; that of a job that was given up meanwhile is dropped."""
        held = self._jobs.get(result.id)
        if held is None:
            return
        if result.last:
            self.release(result.id)
        held.fresh = False
        held.sink.on_result(result)
        if result.last and self._suspects:
            self._suspects.answered(fingerprint(held.job))

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._idle.wait()

    def engine_died(self, reason: str, call: NativeCall | None, *, blameless: bool) -> None:
        """Fail every job. Unless `blameless`, note those that may have caused the end, by the last native call."""
        jobs, self._jobs = self._jobs, {}
        self._idle.set()
        if not blameless:
            self._suspect(jobs, call)
        for held in jobs.values():
            held.sink.on_error(self._fate(held, reason))

    def _suspect(self, jobs: dict[int, _Held], call: NativeCall | None) -> None:
        jobs = {job_id: held for job_id, held in jobs.items() if held.suspect}
        if not jobs:
            return
        keys = {job_id: fingerprint(held.job) for job_id, held in jobs.items()}
        self.blame = self._suspects.died(
            [OnBoard(keys[job_id], held.fresh) for job_id, held in jobs.items()],
            {keys[job_id] for job_id in call.jobs if job_id in keys} if call else (),
            preparing=call is not None and call.stage == "prepare" and any(job_id in keys for job_id in call.jobs),
        )

    def _fate(self, held: _Held, reason: str) -> NodeError:
        """The error of a job that the engine took with it."""
        if held.suspect and self._suspects and self._suspects.standing(fingerprint(held.job)) is Standing.REFUSED:
            return RequestBreaksEngine(
                f"{self._spec.model_id} on {self._spec.device}: the request takes down the engine that runs it "
                f"({reason}); do not send it again"
            )
        return engine_died(self._spec, reason)


def engine_died(spec: EngineSpec, reason: str) -> EngineDied:
    """The error for what an engine took with it, and can be sent again."""
    return EngineDied(f"{spec.model_id} on {spec.device}: {reason}; the request can be sent again")
