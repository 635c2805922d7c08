"""One engine process as the edge process sees it, from spawn to exit.

It knows which jobs the engine holds. When the process dies, its end of the link closes; its exit status and the
kernel's count of kills for memory show the cause, and every job that it held ends at once.

An engine may still compute a job whose caller has left or whose deadline has passed, because a native call cannot be
interrupted. If the process dies in that call, this job is to blame, not the jobs that waited."""

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
from typing import Any, Generic, NamedTuple, Self, cast

import msgspec

from worker_node.core.errors import (
    DeadlineExceeded,
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
    Command,
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
    Shutdown,
)
from worker_node.engines.restart import GrowthLimits, RestartLimits
from worker_node.engines.watchdog import LOAD_TIMEOUT_S, Liveness, LivenessLimits, cause_of_death, stopped
from worker_node.engines.wire import CorruptFrame, FrameBuffer, encode, received_events, submission

log = logging.getLogger(__name__)

# How many jobs are kept whose callers have left: only a flood leaves more within one run.
_MOST_LEFT = 64
# The kernel closes the socket of a process that ends shortly before its exit status is known.
_STATUS_WAIT_S = 1.0
_STATUS_LOOK_S = 0.001
_DRAIN_LOOK_S = 0.02
_LOADING_REPORT_S = 60.0

# Examines an engine process by a known question; raises CanaryFailed.
Canary = Callable[[JobEngine], Awaitable[None]]
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
        self,
        spec: EngineSpec,
        limits: EngineLimits,
        suspects: Suspects,
        memory: MemoryReader = KERNEL,
    ) -> None:
        self._spec = spec
        self._limits = limits
        self._liveness = Liveness(limits.liveness, time.monotonic())
        # When events came, and the latest of them: each look of the watch judges those since the one before.
        self._heard: deque[tuple[float, Event]] = deque()
        self._memory = memory
        # The kernel's count of kills for memory, at the last two looks: a kill of long ago ended another process.
        self._oom_kills = [memory.oom_kills()] * 2
        self._oom_look: asyncio.TimerHandle | None = None
        self._buffer = FrameBuffer()
        self._jobs = HeldJobs(spec, suspects)
        self._ids = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._kill_reason: str | None = None
        self._blameless = False
        self._exit_cause_task: asyncio.Task[None] | None = None
        # Whether the process can still receive commands.
        self.up = False
        self.accepted = 0
        self.killed_from_outside = False
        self.stats = EngineStats()

    @classmethod
    async def spawn(
        cls,
        spec: EngineSpec,
        limits: EngineLimits,
        suspects: Suspects,
        memory: MemoryReader = KERNEL,
    ) -> EngineProcess:
        """Start the process, which waits for `load`."""
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
        """The process's id."""
        return self._process.pid if self._process else None

    @property
    def broken_by_request(self) -> bool:
        """Whether one request is to blame for the end of the process."""
        return self._jobs.broken_by_request

    @property
    def in_flight(self) -> int:
        """How many jobs the engine holds."""
        return len(self._jobs)

    async def load(self) -> Loaded:
        """Have the engine load its model; it is killed after `load_timeout_s`. The log tells how long it takes.

        Raises LoadRefused, EngineDied, TimeoutError; the process has been killed or ends by itself then.
        """
        self._write(encode(self._spec))
        spec, limit = self._spec, self._limits.load_timeout_s
        normal = ""
        if spec.device is Device.NPU:
            normal = "; a first compile for an NPU takes minutes, for a large speech model more than 11"
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                while not (await asyncio.wait({self._loaded}, timeout=_LOADING_REPORT_S))[0]:
                    log.info(
                        "engine %s on %s has been loading for %.0f s, and may for %.0f s (load_timeout_s)%s",
                        spec.model_id,
                        spec.device,
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
        job = msgspec.structs.replace(job, id=next(self._ids))  # type: ignore[type-var]  # each task's job is a struct
        self._send(submission(job))
        self.accepted += 1
        results = JobResults(self, job, result)
        self._jobs.add(job, results, suspect=suspect)
        return results

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineUnavailable when the process has ended."""
        self._send(encode(command))

    def _send(self, frame: bytes) -> None:
        if not self.up:
            raise EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: the engine process has ended")
        self._write(frame)

    def cancel(self, job_id: int) -> None:
        """Cancel a job if the engine still holds it."""
        if self._jobs.leave(job_id) and self.up:
            self._write(encode(Cancel(job_id)))

    async def drain(self, timeout: float) -> None:
        """Wait until the engine holds no job, or for `timeout` seconds."""
        until = time.monotonic() + timeout
        while self._jobs.jobs and time.monotonic() < until:  # noqa: ASYNC110  (rare, and an event is set by each job)
            await asyncio.sleep(_DRAIN_LOOK_S)

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Kill the process at once; callers and /health get `reason`.

        With `blameless` no request that the engine holds becomes a suspect.
        """
        self._kill_reason = reason
        self._blameless = blameless
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def kill_hung(self, reason: str) -> None:
        """As `kill`, for a process that is silent.

        A process that was stopped (SIGSTOP) is treated as killed from outside.
        """
        self.killed_from_outside = stopped(self.pid)
        if self.killed_from_outside:
            reason += "; the process was stopped from outside (SIGSTOP)"
        self.kill(reason, blameless=self.killed_from_outside)

    async def end(self, reason: str | None = None) -> None:
        """Ask it to end, kill it if it has not in time, and wait until it is gone.

        Its jobs end with the `reason` at once; without one they end with the process, and are run again.
        """
        self._blameless = True
        if reason is not None:
            self._jobs.end(EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: {reason}"))
        with contextlib.suppress(EngineUnavailable):
            self.send(Shutdown())
        try:
            async with asyncio.timeout(self._limits.stop_timeout_s):
                await self.wait_closed()
        except TimeoutError:
            self.kill("did not end when asked", blameless=True)
        await self.reap()

    async def wait_closed(self) -> str:
        """Wait for the end of the process and return why it ended."""
        return await asyncio.shield(self._closed)

    async def reap(self) -> None:
        """Wait until the process is gone: it has ended or is ending now."""
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
        log.info("engine %s on %s: exit status %s", self._spec.model_id, self._spec.device, status)

    def _judge_heard(self) -> None:
        while self._heard:
            at, event = self._heard.popleft()
            if isinstance(event, NativeCall):
                self._liveness.called(event.stage, event.units, at)
            else:
                self._liveness.heard(at)

    async def watch(self) -> None:
        """Kill the process when it hangs; return then."""
        while True:
            now = time.monotonic()
            self._judge_heard()
            reason, pause = self._liveness.look(now)
            if reason is not None:
                self.kill_hung(reason)
                return
            await asyncio.sleep(pause)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.up = True
        self._oom_look = self._loop.call_later(self._limits.oom_window_s, self._count_oom_kills)

    def _count_oom_kills(self) -> None:
        self._oom_kills = [self._oom_kills[1], self._memory.oom_kills()]
        self._oom_look = self._loop.call_later(self._limits.oom_window_s, self._count_oom_kills)

    def data_received(self, data: bytes) -> None:
        try:
            events = received_events(self._buffer, data)
            for event in events:
                match event:
                    case Results():
                        # In place, because this is done for each token.
                        for result in event.results:
                            if (held := self._jobs.jobs.get(result.id)) is not None:
                                results = held.results
                                value = msgspec.msgpack.decode(result.body, type=results.form)
                                coming, results.coming = results.coming, self._loop.create_future()
                                results.unread.append(results.coming)
                                if not coming.done():
                                    coming.set_result(value)
                            if result.last:
                                self._jobs.ended(result.id)
                    case NativeCall():
                        self._jobs.call = event
                        if self._jobs.left:
                            self._jobs.keep_called()
                    case _:
                        self._handle(event)
        except (CorruptFrame, msgspec.MsgspecError) as error:
            self.kill(f"sent a corrupt frame ({error})")
            return
        if events:
            self._heard.append((time.monotonic(), events[-1]))

    def _handle(self, event: Loaded | LoadFailed | Failed | Broken | Heartbeat) -> None:
        match event:
            case Heartbeat():
                if event.idle:
                    self._jobs.idle()
                self.stats = event.stats
                self._liveness.beat(event.stats.oldest_run, ran=event.stats.runs > 0)
            case Failed():
                self._jobs.fail(event.id, reported_error(event.code, event.message))
            case Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(event)
            case LoadFailed():
                if not self._loaded.done():
                    self._loaded.set_exception(LoadRefused(with_remedy(event.message)))
                    self._loaded.exception()
            case Broken():
                self.kill(with_remedy(event.message))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport, self.up = None, False
        if self._oom_look is not None:
            self._oom_look.cancel()
        reason = self._kill_reason or "the engine process died"
        if not self._loaded.done():
            self._loaded.set_exception(engine_died(self._spec, reason))
            self._loaded.exception()  # its caller may have stopped waiting for it
        if self._kill_reason is None and not self._blameless:
            self._exit_cause_task = asyncio.create_task(
                self._learn_cause(reason), name=f"cause of death {self._spec.model_id}"
            )
        else:
            self._closed_by(reason)

    def _closed_by(self, reason: str) -> None:
        self._jobs.engine_died(reason, blameless=self._blameless)
        self._closed.set_result(reason)

    async def _learn_cause(self, reason: str) -> None:
        """Fail the jobs once the exit status shows whether one of them, or the engine, can have caused the end."""
        try:
            async with asyncio.timeout(_STATUS_WAIT_S):
                while (status := self._status()) is None:  # noqa: ASYNC110  (only SIGCHLD would say so: not ours)
                    await asyncio.sleep(_STATUS_LOOK_S)
            death = cause_of_death(status, out_of_memory=self._memory.oom_kills() != self._oom_kills[0])
            reason, self.killed_from_outside = death.reason, death.from_outside
            self._blameless = death.from_outside
        except TimeoutError:
            pass
        finally:
            self._closed_by(reason)

    def _status(self) -> int | None:
        return self._process.poll() if self._process is not None else None


class JobResults(Generic[R]):
    """The results of one job, within its deadline; see `Engine.run`.

    Each result is a future: `unread` are those that its reader has not asked for, `coming` is the last of all, which
    has no value yet. No generator, because the event loop keeps a record of each that is started.
    """

    __slots__ = ("_first", "_job", "_process", "_timer", "coming", "form", "unread")

    def __init__(self, process: EngineProcess, job: Job, form: type[R]) -> None:
        self._process = process
        self._job = job
        self.form = form
        loop = asyncio.get_running_loop()
        self.coming: asyncio.Future[R] = loop.create_future()
        self._first = self.coming
        self.unread = deque([self.coming])
        # One timer for the whole job: a stream has a result for each token.
        self._timer = loop.call_later(max(0.0, job.deadline - time.monotonic()), self._expire)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[R]:
        if not self.unread:
            raise StopAsyncIteration
        return self.unread.popleft()

    def end(self, error: NodeError | StopAsyncIteration) -> None:
        """End after the results so far, with an error or without."""
        self._timer.cancel()
        if not self.coming.done():
            self.coming.set_exception(error)
            self.coming.exception()  # its reader may have left

    async def aclose(self) -> None:
        """Cancel the job if it has not ended."""
        self._timer.cancel()
        self._process.cancel(self._job.id)

    def _expire(self) -> None:
        left = self._job.ends - time.monotonic()
        if self._first.done() and left > 0:
            if left < math.inf:
                self._timer = asyncio.get_running_loop().call_later(left, self._expire)
            return
        self._process.cancel(self._job.id)
        self.end(DeadlineExceeded("the deadline passed while the engine worked on the request"))


class Held(NamedTuple):
    """A job that the engine holds. The canary's is never `suspect`."""

    job: Job
    results: JobResults[Any]
    suspect: bool


class HeldJobs:
    """Jobs by id; `broken_by_request` says once the process has died whether one of them is to blame.

    `left` are jobs whose callers have left; `call` is the last native call.
    """

    def __init__(self, spec: EngineSpec, suspects: Suspects) -> None:
        self._spec = spec
        self._suspects = suspects
        self.jobs: dict[int, Held] = {}
        self.left: dict[int, Held] = {}
        self.call: NativeCall | None = None
        self.broken_by_request = False

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job, results: JobResults[Any], *, suspect: bool) -> None:
        """Record that the engine holds the job."""
        self.jobs[job.id] = Held(job, results, suspect)

    def fail(self, job_id: int, error: NodeError) -> None:
        """End one job with an error."""
        self.left.pop(job_id, None)
        if (held := self.jobs.pop(job_id, None)) is not None:
            held.results.end(error)

    def leave(self, job_id: int) -> bool:
        """Record that the caller of a job has left; return whether the engine still held the job."""
        held = self.jobs.pop(job_id, None)
        if held is not None and held.suspect:
            self.left[job_id] = held
            if len(self.left) > _MOST_LEFT:
                called = () if self.call is None else self.call.jobs
                del self.left[next((other for other in self.left if other not in called), job_id)]
        return held is not None

    def keep_called(self) -> None:
        """Forget the jobs whose callers have left but those of the last call: the engine computes no others."""
        called = () if self.call is None else self.call.jobs
        self.left = {job_id: held for job_id, held in self.left.items() if job_id in called}

    def idle(self) -> None:
        """Record that the engine computes nothing."""
        self.left.clear()

    def ended(self, job_id: int) -> None:
        """Record that a job has had its last result."""
        self.left.pop(job_id, None)
        if (held := self.jobs.pop(job_id, None)) is not None:
            held.results.end(StopAsyncIteration())
            if self._suspects:
                self._suspects.answered(fingerprint(held.job))

    def end(self, error: NodeError) -> None:
        """Fail every job with an error for which no request is to blame."""
        jobs, self.jobs, self.left = self.jobs, {}, {}
        for held in jobs.values():
            held.results.end(error)

    def engine_died(self, reason: str, *, blameless: bool) -> None:
        """Fail every job. Unless `blameless`, record the jobs that may have caused the end, by the last native call."""
        jobs, self.jobs = self.jobs, {}
        left, self.left = self.left, {}
        if not blameless:
            self._suspect(jobs | left)
        for held in jobs.values():
            held.results.end(self._error_for(held, reason))

    def _suspect(self, jobs: dict[int, Held]) -> None:
        """Suspect the jobs of the last native call, or all if it named none of them."""
        named = [] if self.call is None else [jobs[job_id] for job_id in self.call.jobs if job_id in jobs]
        suspects = {fingerprint(held.job) for held in named or jobs.values() if held.suspect}
        if suspects:  # else the canary's question alone was in the call
            self.broken_by_request = self._suspects.died(suspects)

    def _error_for(self, held: Held, reason: str) -> NodeError:
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
