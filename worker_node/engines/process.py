"""One engine process as the edge process sees it, from spawn to exit.

It knows which jobs the engine holds. When the process dies, its end of the link closes; its exit status and the
kernel's count of kills for memory show the cause, and every job that it held ends at once.

A native call or a run cannot be interrupted: an engine may still compute a job whose caller has left or whose deadline
has passed. If the process dies meanwhile, this job is to blame, not the jobs that waited."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, cast

import msgspec

from worker_node.core.errors import (
    DeadlineExceeded,
    EngineCrashed,
    EngineDied,
    EngineUnavailable,
    NodeError,
    RequestBreaksEngine,
    reported_error,
)
from worker_node.core.operating_system import start_module
from worker_node.core.types import Device
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.devices.npu import with_remedy
from worker_node.engines.isolation import Suspects, fingerprint
from worker_node.engines.protocol import (
    Broken,
    Cancel,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    Heartbeat,
    Job,
    JobEngine,
    Loaded,
    LoadFailed,
    NativeCall,
    R,
    Results,
    Running,
    Shutdown,
)
from worker_node.engines.restart import GrowthLimits, RestartLimits
from worker_node.engines.watchdog import LOAD_TIMEOUT_S, Blame, Death, Liveness, LivenessLimits, cause_of_death, stopped
from worker_node.engines.wire import EVENTS, CorruptFrame, FrameBuffer, encode, submission

log = logging.getLogger(__name__)

# How many jobs are kept whose callers have left: only a flood leaves more within one run.
_MOST_LEFT = 64
# The kernel closes the socket of a process that ends shortly before its exit status is known.
_STATUS_WAIT_S = 1.0
_STATUS_LOOK_S = 0.001
_DRAIN_LOOK_S = 0.02
_LOADING_REPORT_S = 60.0
# Of a request that was lost with its engine.
_LOST = "{}: {}; the request can be sent again"
_EXPIRED = "the deadline passed before the engine had finished the request"

# Examines an engine process by a known question; raises CanaryFailed.
Canary = Callable[[JobEngine], Awaitable[None]]
# Fills the prefix cache of an engine process that serves already.
Prewarm = Callable[[JobEngine], Awaitable[None]]
# What a canary gives an engine to answer.
CANARY_TIMEOUT_S = 120.0


class CanaryFailed(Exception):
    """The engine runs, but its answers are wrong."""


class LoadRefused(Exception):
    """The engine reports that its model cannot be loaded on its device: an immediate restart would end the same way."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Seconds. A cold compile for an NPU takes minutes, so loading has a limit of its own.

    After `canary_interval_s` an idle engine is examined again. A kill for memory counts as an engine's for at least
    `oom_window_s`, and at most twice that: a process of many gigabytes takes seconds to end.
    """

    load_timeout_s: float = LOAD_TIMEOUT_S
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    stop_timeout_s: float = 5.0
    canary_interval_s: float = 300.0
    oom_window_s: float = 5.0
    restart: RestartLimits = field(default_factory=RestartLimits)
    growth: GrowthLimits = field(default_factory=GrowthLimits)


class EngineProcess(asyncio.Protocol):
    """A running engine process and the socket to it. Make it with `spawn`; call `load`, then `watch` in a task."""

    def __init__(
        self, spec: EngineSpec, limits: EngineLimits, suspects: Suspects, memory: MemoryReader = KERNEL
    ) -> None:
        self._spec = spec
        self._name = f"{spec.model_id} on {spec.device}"
        self._limits = limits
        self._suspects = suspects
        self._liveness = Liveness(limits.liveness, time.monotonic())
        self._memory = memory
        # The kernel's count of kills for memory, at the last two looks: a kill of long ago ended another process.
        self._oom_kills = [memory.oom_kills()] * 2
        self._oom_look: asyncio.TimerHandle | None = None
        self._buffer = FrameBuffer()
        self._jobs: dict[int, JobResults[Any]] = {}
        # Jobs whose callers have left, and the last native call, which may still work on them.
        self._left: dict[int, JobResults[Any]] = {}
        # Those that the device works on, as the engine said last.
        self._working: list[int] = []
        self._ids = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._closed: asyncio.Future[Death] = self._loop.create_future()
        # Why it ends, where this process ends it.
        self._death: Death | None = None
        self._exit_cause_task: asyncio.Task[None] | None = None
        # Whether the process can still receive commands.
        self.up = False
        self.accepted = 0
        self.stats = EngineStats()

    @classmethod
    async def spawn(
        cls, spec: EngineSpec, limits: EngineLimits, suspects: Suspects, memory: MemoryReader = KERNEL
    ) -> EngineProcess:
        self = cls(spec, limits, suspects, memory)
        self._process, link = start_module("worker_node.engines.child")
        try:
            ours = await asyncio.to_thread(link)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)
        except BaseException:
            self.kill("the node was stopped while it started")
            await self.reap()
            with contextlib.suppress(OSError):
                link().close()
            raise
        return self

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    async def load(self) -> Loaded:
        """Have the engine load its model. Raises LoadRefused, EngineDied, TimeoutError after `load_timeout_s`."""
        self._write(encode(self._spec))
        limit = self._limits.load_timeout_s
        normal = ""
        if self._spec.device is Device.NPU:
            normal = "; a first compile for an NPU takes minutes, for a large speech model more than 11"
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                while not (await asyncio.wait({self._loaded}, timeout=_LOADING_REPORT_S))[0]:
                    log.info(
                        "engine %s has been loading for %.0f s, and may for %.0f s (load_timeout_s)%s",
                        self._name,
                        time.monotonic() - began,
                        limit,
                        normal,
                    )
                return await self._loaded
        except TimeoutError:
            self.kill(f"did not load within {limit:.0f} s (load_timeout_s)")
            raise

    def run(self, job: Job, result: type[R], *, suspect: bool = False) -> JobResults[R]:
        """See `Engine.run`. The job may be blamed for the death of the process if it is `suspect`: not a canary's."""
        if not self.up:
            raise EngineUnavailable(f"{self._name}: the engine process has ended")
        if job.deadline <= time.monotonic():
            # Nobody waits for it: a quick engine would compute it before the timer ends it.
            raise DeadlineExceeded(_EXPIRED)
        job = msgspec.structs.replace(job, id=next(self._ids))  # type: ignore[type-var]  # each task's job is a struct
        self._write(submission(job))
        self.accepted += 1
        results = self._jobs[job.id] = JobResults(self, job, result, suspect=suspect)
        return results

    def cancel(self, job_id: int) -> None:
        """Cancel a job if the engine still holds it; the engine may compute it until its native call returns."""
        held = self._jobs.pop(job_id, None)
        if held is None:
            return
        if held.suspect:
            self._left[job_id] = held
            if len(self._left) > _MOST_LEFT:
                del self._left[next((other for other in self._left if other not in self._working), job_id)]
        self._write(encode(Cancel(job_id)))

    async def drain(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self._jobs and time.monotonic() < until:  # noqa: ASYNC110  (rare, and an event is set by each job)
            await asyncio.sleep(_DRAIN_LOOK_S)

    def kill(self, reason: str, blame: Blame = Blame.UNKNOWN) -> None:
        """Kill the process at once; callers and /health get `reason`.

        Only where the blame is unknown do requests that the engine holds become suspects.
        """
        self._death = Death(reason, blame)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def end(self, reason: str | None = None) -> None:
        """Ask it to end, kill it if it has not in time, and wait until it is gone.

        Its jobs end with the `reason` at once; without one they end with the process, and are run again.
        """
        self._death = self._death or Death("the engine process died", Blame.NODE)
        if reason is not None:
            jobs, self._jobs, self._left = self._jobs, {}, {}
            for held in jobs.values():
                held.end(EngineUnavailable(f"{self._name}: {reason}"))
        self._write(encode(Shutdown()))
        try:
            async with asyncio.timeout(self._limits.stop_timeout_s):
                await self.wait_closed()
        except TimeoutError:
            self.kill("did not end when asked", Blame.NODE)
        await self.reap()

    async def wait_closed(self) -> Death:
        return await asyncio.shield(self._closed)

    async def reap(self) -> None:
        if self._process is None:
            return
        if self._transport is not None:
            self._transport.close()
            self.up = False
        # Its socket is closed, so it is ending: in native clean-up at worst, which must not hold us up for long.
        try:
            status = await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        log.info("engine %s: exit status %s", self._name, status)

    async def watch(self) -> None:
        """Kill the process when it hangs; return then."""
        while True:
            reason, pause = self._liveness.look(time.monotonic())
            if reason is not None:
                if stopped(self.pid):
                    self.kill(f"{reason}; the process was stopped from outside (SIGSTOP)", Blame.OUTSIDE)
                else:
                    self.kill(reason)
                return
            await asyncio.sleep(pause)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and self.up:
            self._transport.write(frame)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.up = True
        self._oom_look = self._loop.call_later(self._limits.oom_window_s, self._count_oom_kills)

    def _count_oom_kills(self) -> None:
        self._oom_kills = [self._oom_kills[1], self._memory.oom_kills()]
        self._oom_look = self._loop.call_later(self._limits.oom_window_s, self._count_oom_kills)

    def data_received(self, data: bytes) -> None:
        event: Event | None = None
        try:
            for body in self._buffer.feed(data):
                event = EVENTS.decode(body)
                match event:
                    case Results():
                        # In place, because this is done for each token.
                        for result in event.results:
                            if (results := self._jobs.get(result.id)) is not None:
                                value = msgspec.msgpack.decode(result.body, type=results.form)
                                coming, results.coming = results.coming, self._loop.create_future()
                                results.unread.append(results.coming)
                                if not coming.done():
                                    coming.set_result(value)
                            if result.last:
                                self._ended(result.id)
                    case NativeCall() | Running():
                        self._working = event.jobs
                        if self._left:
                            # The engine computes none of the others any more.
                            self._left = {job: held for job, held in self._left.items() if job in event.jobs}
                    case _:
                        self._handle(event)
        except (CorruptFrame, msgspec.MsgspecError) as error:
            self.kill(f"sent a corrupt frame ({error})")
            return
        if event is not None:
            self._liveness.heard_at = time.monotonic()
            self._liveness.call = event if isinstance(event, NativeCall) else None

    def _handle(self, event: Loaded | LoadFailed | Failed | Broken | Heartbeat) -> None:
        match event:
            case Heartbeat():
                if event.idle:
                    self._left.clear()
                self.stats = event.stats
                self._liveness.run, self._liveness.ran = event.stats.oldest_run, event.stats.runs > 0
            case Failed():
                self._ended(event.id, reported_error(event.code, event.message))
            case Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(event)
            case LoadFailed():
                if not self._loaded.done():
                    self._loaded.set_exception(LoadRefused(self._explained(event.message)))
                    self._loaded.exception()
            case Broken():
                self.kill(self._explained(event.message))

    def _explained(self, error: str) -> str:
        return with_remedy(error) if self._spec.device is Device.NPU else error

    def _ended(self, job_id: int, error: NodeError | None = None) -> None:
        self._left.pop(job_id, None)
        held = self._jobs.pop(job_id, None)
        if held is None:
            return
        held.end(error or StopAsyncIteration())
        if error is None and self._suspects:
            self._suspects.answered(fingerprint(held.job))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport, self.up = None, False
        if self._oom_look is not None:
            self._oom_look.cancel()
        death = self._death or Death("the engine process died")
        if not self._loaded.done():
            self._loaded.set_exception(EngineDied(_LOST.format(self._name, death.reason)))
            self._loaded.exception()  # its caller may have stopped waiting for it
        if self._death is None:
            self._exit_cause_task = asyncio.create_task(
                self._learn_cause(death), name=f"cause of death {self._spec.model_id}"
            )
        else:
            self._closed_by(death)

    async def _learn_cause(self, death: Death) -> None:
        """End the jobs once the exit status shows whether one of them, or the engine, can have caused the end."""
        try:
            async with asyncio.timeout(_STATUS_WAIT_S):
                # Only SIGCHLD would say so, which is not ours.
                while self._process is None or (status := self._process.poll()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(_STATUS_LOOK_S)
            death = cause_of_death(status, out_of_memory=self._memory.oom_kills() != self._oom_kills[0])
        except TimeoutError:
            pass
        finally:
            self._closed_by(death)

    def _closed_by(self, death: Death) -> None:
        """Fail every job. Those that the device worked on, or all if none is known, may have caused an unknown end."""
        jobs, left = self._jobs, self._left
        self._jobs, self._left = {}, {}
        suspects: dict[bytes, float] = {}
        if death.blame is Blame.UNKNOWN:
            held_jobs = jobs | left
            named = [held_jobs[job] for job in self._working if job in held_jobs]
            now = time.monotonic()
            suspects = {fingerprint(held.job): now - held.began for held in named or held_jobs.values() if held.suspect}
            # Without any, the canary's question alone was in the call.
            if suspects and self._suspects.died(suspects):
                death = Death(death.reason, Blame.REQUEST)
        for held in jobs.values():
            key = fingerprint(held.job) if held.suspect and self._suspects else None
            kind = EngineCrashed if key in suspects else EngineDied
            error: NodeError = kind(_LOST.format(self._name, death.reason))
            if key is not None and self._suspects.refuses(key):
                error = RequestBreaksEngine(
                    f"{self._name}: the request takes down the engine that runs it ({death.reason}); "
                    "do not send it again"
                )
            held.end(error)
        self._closed.set_result(death)


class JobResults(Generic[R]):
    """One job that the engine holds, and its results within its deadline; see `Engine.run`.

    Each result is a future: `unread` are those that its reader has not asked for, `coming` is the last of all, which
    has no value yet. No generator, because the event loop keeps a record of each that is started. A canary's job is
    never `suspect`.
    """

    __slots__ = ("_first", "_process", "_timer", "began", "coming", "form", "job", "suspect", "unread")

    def __init__(self, process: EngineProcess, job: Job, form: type[R], *, suspect: bool) -> None:
        self._process = process
        self.job = job
        self.form = form
        self.suspect = suspect
        self.began = time.monotonic()
        loop = asyncio.get_running_loop()
        self.coming: asyncio.Future[R] = loop.create_future()
        self._first = self.coming
        self.unread = deque([self.coming])
        # One timer for the whole job: a stream has a result for each token.
        self._timer = loop.call_later(max(0.0, job.deadline - self.began), self._expire)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[R]:
        if not self.unread:
            raise StopAsyncIteration
        return self.unread.popleft()

    def end(self, error: NodeError | StopAsyncIteration) -> None:
        self._timer.cancel()
        if not self.coming.done():
            self.coming.set_exception(error)
            self.coming.exception()  # its reader may have left

    async def aclose(self) -> None:
        self._timer.cancel()
        self._process.cancel(self.job.id)

    def _expire(self) -> None:
        left = self.job.ends - time.monotonic()
        if self._first.done() and left > 0:
            if left < math.inf:
                self._timer = asyncio.get_running_loop().call_later(left, self._expire)
            return
        self._process.cancel(self.job.id)
        self.end(DeadlineExceeded(_EXPIRED))
