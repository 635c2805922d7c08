"""Where the results of one job go in the edge process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, Self, cast

import msgspec

from worker_node.core import errors
from worker_node.core.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineUnavailable,
    NodeError,
    Overloaded,
    RequestBreaksEngine,
)
from worker_node.core.operating_system import start_module
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.engines.cpu_share import ALONE, CpuPlace
from worker_node.engines.isolation import BY_ITSELF, Blame, Suspects, fingerprint
from worker_node.engines.protocol import (
    Broken,
    CanaryProof,
    Cancel,
    Command,
    Engine,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    Heartbeat,
    Job,
    Loaded,
    LoadFailed,
    NativeCall,
    R,
    Result,
    Results,
    Shutdown,
    submission,
)
from worker_node.engines.restart import GrowthLimits, RestartLimits
from worker_node.engines.watchdog import Liveness, LivenessLimits, LoadWatch, activity_of, stopped
from worker_node.engines.wire import CorruptFrame, FrameBuffer, decode_event, encode


class JobSink:
    """Holds the encoded results of a job until its only caller reads them; bounded by the results of one job.

    Replaces `asyncio.Queue` at a fifth of its cost, which every job pays.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Result | NodeError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Result:
        """Return the next result. Raises the error that ended the job."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if isinstance(item, NodeError):
            raise item
        return item

    def put(self, item: Result | NodeError) -> None:
        """Take a result, or the error that the job ends with."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# The jobs that an engine process holds, and the error that each gets when the process dies.
#
# An engine may still compute a job whose caller has left or whose deadline has passed, because a native call cannot be
# interrupted. If the process dies in that call, this job is to blame, not the jobs that waited.

# How many jobs are kept whose callers have left: only a flood leaves more within one run.
_MOST_LEFT = 64


class _Held(NamedTuple):
    """A job that the engine holds. The canary's is never `suspect`."""

    job: Job
    sink: JobSink
    suspect: bool


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

    def leave(self, job_id: int) -> bool:
        """Record that the caller of a job has left; return whether the engine still held the job."""
        held = self._take(job_id)
        if held is not None and held.suspect:
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

    def idle(self) -> None:
        """Record that the engine works on nothing, not for callers who have left either."""
        self._left.clear()

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
        """Suspect the jobs of the last native call, or all if it named none of them."""
        named = [] if self._call is None else [jobs[job_id] for job_id in self._call.jobs if job_id in jobs]
        suspects = {fingerprint(held.job) for held in named or jobs.values() if held.suspect}
        if suspects:  # else the canary's question alone was in the call
            self.blame = self._suspects.died(suspects)

    def _fate(self, held: _Held, reason: str) -> NodeError:
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


# What ended an engine process: itself, its memory, or a kill from outside (an operator, a deployment, a test).
#
# A request that breaks its engine ends it by a signal such as SIGSEGV or SIGABRT, by an exit status, or by the memory
# that it takes: then the kernel or a daemon sends SIGKILL, too. Pure: the caller supplies the readings.

# What others send and no request raises.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
# A death is compared with a reading that is at least so old: the newest may be younger than the kill.
_WINDOW_S = 5.0
# Daemons kill the process that takes the machine's memory before the kernel must.
_GROWTH_BYTES = 1 << 30
_LEFT_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    oom_kills: int | None
    own: int | None


@dataclass(frozen=True, slots=True)
class Death:
    """Why a process ended, for people; `from_outside` only if that is known and its memory was not the reason."""

    reason: str
    from_outside: bool = False


@dataclass(slots=True)
class KillWatch:
    """Readings of one engine process while it lives, and the verdict when it has ended."""

    memory: MemoryReader = KERNEL
    _older: _Reading | None = field(default=None, init=False)
    _newer: _Reading | None = field(default=None, init=False)
    _own: int | None = field(default=None, init=False)
    _left: int | None = field(default=None, init=False)

    def look(self, now: float, pid: int | None, *, loading: bool = False) -> None:
        """Note what the process has taken and what is left; once a second. While it is `loading` it grows anyway."""
        own = None if pid is None or loading else self.memory.own(pid)
        if own is not None:  # a process that has just ended has none
            self._own = own
        if own is not None or loading:
            self._left = self.memory.available()
        if own is not None and self._newer is not None and self._newer.own is None:
            self._older = self._newer = None  # from now on its growth is measured
        if self._newer is None or now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Reading(now, self.memory.oom_kills(), own)

    def verdict(self, status: int | None) -> Death:
        """What ended the process, by its exit status (negative: the signal; None: it is not known)."""
        if status not in _FROM_OUTSIDE:
            return Death("the engine process died" + _how(status))
        before = self._older or self._newer
        if before is None:
            return Death("the engine process was killed" + _how(status))
        grown = 0 if self._own is None or before.own is None else self._own - before.own
        if self.memory.oom_kills() != before.oom_kills:
            reason = "the kernel has killed for lack of memory"
        elif grown >= _GROWTH_BYTES:
            reason = f"its memory had just grown by {grown / 1e6:.0f} MB"
        elif self._left is not None and self._left < _LEFT_BYTES:
            reason = f"the machine had {self._left / 1e6:.0f} MB of memory left"
        else:
            return Death("the engine process was killed from outside" + _how(status), from_outside=True)
        return Death(f"the engine process was killed{_how(status)}, most likely for its memory: {reason}")


def _how(status: int | None) -> str:
    if status is None:
        return ""
    if status >= 0:
        return f" (exit status {status})"
    try:
        return f" ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal has no name
        return f" (signal {-status})"


# One life of one engine process, as the edge process sees it: from spawn to death.
#
# The link knows which jobs the engine holds. When the process dies, its end of the socket pair closes and every job
# that
# it held fails at once, without waiting for a timeout.

_ERRORS: dict[str, type[NodeError]] = {
    cls.code: cls
    for cls in (
        errors.BadRequest,
        errors.ContextLengthExceeded,
        errors.DeadlineExceeded,
        errors.EngineUnavailable,
        errors.InternalError,
        errors.Overloaded,
        errors.UnsupportedParameter,
    )
}

_LAST_WORDS_BYTES = 1 << 16
# The kernel closes the socket of a process that ends shortly before its exit status is known.
_STATUS_WAIT_S = 1.0
_STATUS_LOOK_S = 0.001


class EngineLink(asyncio.Protocol):
    """A running engine process and the socket to it. Make it with `spawn`."""

    def __init__(
        self, spec: EngineSpec, liveness: Liveness, suspects: Suspects, kills: KillWatch, cpu: CpuPlace = ALONE
    ) -> None:
        self._spec = spec
        self.seat = cpu.seat()
        self.liveness = liveness
        self.kills = kills
        self._buffer = FrameBuffer()
        self._jobs = HeldJobs(spec, suspects, self.seat.ended)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self._closed: asyncio.Future[str] = loop.create_future()
        self.accepted = 0
        self._kill_reason: str | None = None
        self._blameless = False
        self.killed_from_outside = False
        self._inquest: asyncio.Task[None] | None = None
        self.stats = EngineStats()

    @classmethod
    async def spawn(
        cls, spec: EngineSpec, liveness: Liveness, suspects: Suspects, kills: KillWatch, cpu: CpuPlace = ALONE
    ) -> EngineLink:
        """Start the engine process, which loads its model after `begin`."""
        link = cls(spec, liveness, suspects, kills, cpu)
        link._process, ours = start_module("worker_node.engines.child")
        link.seat.process = link._process
        ours.setblocking(False)
        link._socket = ours.dup()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException:
            link.kill("the node was stopped while it started")
            ours.close()
            link._socket.close()
            await link.reap()
            raise
        return link

    def begin(self) -> None:
        """Have the engine load its model; `loaded` resolves when the pipeline is up."""
        self._write(encode(self._spec))

    @property
    def pid(self) -> int | None:
        """The engine's process id while it lives."""
        return self._process.pid if self._process else None

    @property
    def up(self) -> bool:
        """Whether the engine process can still receive commands."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def blame(self) -> Blame:
        """What ended the engine."""
        return self._jobs.blame

    @property
    def in_flight(self) -> int:
        """How many jobs the engine holds."""
        return len(self._jobs)

    def submit(self, job: Job, sink: JobSink, *, suspect: bool) -> None:
        """Hand over a job; its results go to `sink` until it ends. Raises EngineUnavailable when the link is down."""
        self.send(submission(job))
        self.accepted += 1
        self._jobs.add(job, sink, suspect=suspect)
        self.seat.began(job)

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineUnavailable when the link is down."""
        if not self.up:
            raise EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: the engine process has ended")
        self._write(encode(command))

    def forget(self, job_id: int) -> bool:
        """Drop a job's sink; True if the engine still held the job."""
        return self._jobs.leave(job_id)

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._jobs.drained()

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Kill the process at once; callers and /health get `reason`.

        With `blameless` no request that the engine holds becomes a suspect.
        """
        self._kill_reason = reason
        self._blameless = blameless
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def kill_hung(self, reason: str) -> None:
        """As `kill`, for a process that is silent.

        A process that was stopped (SIGSTOP) is treated as killed from outside.
        """
        self.killed_from_outside = stopped(self.pid) and not self.seat.paused
        if self.killed_from_outside:
            reason += "; the process was stopped from outside (SIGSTOP)"
        self.kill(reason, blameless=self.killed_from_outside)

    async def shut_down(self, timeout: float, reason: str | None = None) -> None:
        """See `EngineProcess.end`."""
        self._blameless = True
        if reason is not None:
            self._jobs.end(EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: {reason}"))
        self.seat.closed()
        with contextlib.suppress(EngineUnavailable):
            self.send(Shutdown())
        try:
            async with asyncio.timeout(timeout):
                await self.wait_closed()
        except TimeoutError:
            self.kill("did not end when asked")
        await self.reap()

    async def wait_closed(self) -> str:
        """Wait for the end of the engine process and return why it ended."""
        return await asyncio.shield(self._closed)

    async def reap(self) -> int | None:
        """Wait until the process is gone for good and return its exit status."""
        if self._process is None:
            return None
        if self._transport is not None:
            self._transport.close()
        # Its socket is closed, so it is ending: in native clean-up at worst, which must not hold us up for long.
        try:
            return await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for body in self._buffer.feed(data):
                event = decode_event(body)
                self.liveness.heard(self.seat.ran_until(now))
                self._dispatch(event)
        except CorruptFrame as error:
            self.kill(f"sent a corrupt frame ({error})")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self.seat.closed()
        self._read_last_words()
        reason = self._kill_reason or "the engine process died"
        if not self.loaded.done():
            self.loaded.set_exception(engine_died(self._spec, reason))
            self.loaded.exception()  # its caller may have stopped waiting for it
        if self._kill_reason is None and not self._blameless:
            self._inquest = asyncio.create_task(self._learn_cause(reason), name=f"cause of death {self._spec.model_id}")
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._jobs.engine_died(reason, blameless=self._blameless)
        self._closed.set_result(reason)

    async def _learn_cause(self, reason: str) -> None:
        """Fail the jobs once the exit status shows whether one of them, or the engine, can have caused the end."""
        try:
            async with asyncio.timeout(_STATUS_WAIT_S):
                while self._status() is None:  # noqa: ASYNC110  (no event tells of it but SIGCHLD, which is not ours)
                    await asyncio.sleep(_STATUS_LOOK_S)
            death = self.kills.verdict(self._status())
            reason, self.killed_from_outside = death.reason, death.from_outside
            self._blameless = death.from_outside
        except TimeoutError:
            pass
        finally:
            self._end(reason)

    def _status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def _read_last_words(self) -> None:
        """Read what the engine sent before it ended: a failed write to it closes the transport with that unread.

        It may be the announcement that shows which request is to blame.
        """
        if self._socket is None:
            return
        with self._socket as connection, contextlib.suppress(OSError):
            while data := connection.recv(_LAST_WORDS_BYTES):
                self.data_received(data)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Results():
                for result in event.results:
                    self._jobs.deliver(result)
            case Failed():
                sink = self._jobs.release(event.id)
                if sink is not None:
                    sink.put(_ERRORS.get(event.code, errors.InternalError)(event.message))
            case Loaded():
                if not self.loaded.done():
                    self.loaded.set_result(event)
            case LoadFailed():
                if not self.loaded.done():
                    self.loaded.set_exception(LoadRefused(event.message))
                    self.loaded.exception()
            case Broken():
                self.kill(event.message)
            case Heartbeat():
                self.stats = event.stats
                now, oldest = time.monotonic(), event.stats.oldest_run
                ran = None if oldest is None else (oldest[0], self.seat.ran_of(oldest[1], now))
                self.liveness.beat(ran, event.stats.last_run)
                if event.idle:
                    self._jobs.idle()
            case NativeCall():
                self._jobs.called(event)
                self.liveness.called(event.stage, event.units, self.seat.ran_until(time.monotonic()))


class LoadRefused(Exception):
    """The engine reports that its model cannot be loaded on its device: an immediate restart would end the same way."""


# Loading slots: on each device one engine at a time compiles, whether for a first load, a restart or a successor.

FREE: AbstractAsyncContextManager[object] = nullcontext()


class LoadingSlots:
    """One slot for each device, granted in order of request."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    def slot(self, device: str) -> AbstractAsyncContextManager[object]:
        """What an engine of the device holds while it loads."""
        return self._locks.setdefault(device, asyncio.Lock())


# One life of one engine process: spawn, load, canary, supervision, end.
#
# The canary runs before the engine counts as ready, and again at intervals while the engine is idle: a device that
# computes garbage raises no error.

log = logging.getLogger(__name__)

# After a look that failed.
_WATCH_AGAIN_S = 1.0

Canary = Callable[[Engine], Awaitable[None]]
# What a canary gives an engine to answer.
CANARY_TIMEOUT_S = 120.0


class CanaryFailed(Exception):
    """The engine runs, but its answers are wrong."""


class _CanaryUnanswered(Exception):
    """An idle engine did not answer the known question: it hangs."""


class End(Enum):
    """How a life ended: a crash, hang or limit; wrong answers; a load that the engine refused; memory growth."""

    CRASHED = auto()
    WRONG = auto()
    HOPELESS = auto()
    OUTGROWN = auto()


@dataclass(frozen=True, slots=True)
class HostingLimits:
    """Seconds. A cold compile for an NPU takes minutes, so loading has a limit of its own; see also `loading`.

    After `canary_interval_s` an idle engine is examined again.
    """

    load_timeout_s: float = 600.0
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    stop_timeout_s: float = 5.0
    canary_interval_s: float = 300.0
    restart: RestartLimits = field(default_factory=RestartLimits)
    growth: GrowthLimits = field(default_factory=GrowthLimits)


class EngineLife:
    """Runs and watches one engine process. `examine` asks the canary; `on_ready` is called when it first passed.

    The engine loads while `slot` is held.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: HostingLimits,
        examine: Callable[[Loaded], Awaitable[None]],
        on_ready: Callable[[], None],
        slot: AbstractAsyncContextManager[object] = FREE,
    ) -> None:
        self._spec = spec
        self._limits = limits
        self._slot = slot
        self._examine = examine
        self._on_ready = on_ready

    async def run(self, link: EngineLink) -> tuple[End, str]:
        """Serve on a process just spawned until it ends; return how and why it did."""
        # For the verdict on what ends it before it loads.
        link.kills.look(time.monotonic(), link.pid, loading=True)
        try:
            async with self._turn(link), asyncio.timeout(self._limits.load_timeout_s):
                loaded = await self._load(link)
        except TimeoutError:
            link.kill(f"did not load within {self._limits.load_timeout_s:.0f} s")
            return End.CRASHED, await link.wait_closed()
        except LoadRefused as error:
            await link.wait_closed()
            return End.HOPELESS, f"cannot be loaded: {error}"
        except EngineUnavailable:
            what = "" if self._spec.loads is None else f" {self._spec.loads}"
            return End.CRASHED, f"{await link.wait_closed()} while loading{what}"
        watchdog = asyncio.create_task(self._watch(link), name=f"watchdog {self._spec.model_id}")
        try:
            return await self._serve(link, loaded)
        except CanaryFailed as error:
            link.kill(f"canary failed: {error}", blameless=True)
            return End.WRONG, await link.wait_closed()
        except _CanaryUnanswered as error:
            link.kill(f"canary not answered: {error}", blameless=True)
            return End.CRASHED, await link.wait_closed()
        finally:
            watchdog.cancel()
            # Not with the cancellation suppressed: it may be ours, and then the engine is to be stopped.
            await asyncio.gather(watchdog, return_exceptions=True)

    @asynccontextmanager
    async def _turn(self, link: EngineLink) -> AsyncIterator[None]:
        """Hold the slot. Raises EngineUnavailable when the process ends before its turn comes."""
        async with AsyncExitStack() as held:
            turn = asyncio.create_task(held.enter_async_context(self._slot))
            either: list[asyncio.Future[Any]] = [turn, link.loaded]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not turn.done():
                    await link.loaded  # it did not get the command to load: it can only have failed
            finally:
                turn.cancel()  # of no effect once it has come
                await asyncio.gather(turn, return_exceptions=True)
            yield

    async def _load(self, link: EngineLink) -> Loaded:
        """Have the engine load; one that stops computing is killed. Raises EngineUnavailable, LoadRefused."""
        link.begin()
        watchdog = asyncio.create_task(self._watch_load(link), name=f"load of {self._spec.model_id}")
        try:
            return await link.loaded
        finally:
            watchdog.cancel()

    async def _watch_load(self, link: EngineLink) -> None:
        watch = LoadWatch(self._limits.liveness.watchdog_s, time.monotonic())
        while True:
            now = time.monotonic()
            link.kills.look(now, link.pid, loading=True)
            reason = watch.look(now, activity_of(link.pid))
            if reason is not None:
                link.kill_hung(reason)
                return
            await asyncio.sleep(watch.look_s)

    async def _serve(self, link: EngineLink, loaded: Loaded) -> tuple[End, str]:
        try:
            await self._examine(loaded)
        except NodeError as error:
            link.kill(f"canary could not run: {error.message}")
            return End.CRASHED, await link.wait_closed()
        self._on_ready()
        log.info("engine %s on %s is ready, pid %s", self._spec.model_id, self._spec.device, link.pid)
        return await self._attend(link, loaded)

    async def _attend(self, link: EngineLink, loaded: Loaded) -> tuple[End, str]:
        """Look after a ready engine until its process ends. Raises CanaryFailed."""
        limits = self._limits
        # A busy engine is looked at again soon; before an examination is due there is nothing to look for.
        retry_s = min(1.0, limits.canary_interval_s)
        look_s = limits.canary_interval_s
        while True:
            try:
                async with asyncio.timeout(look_s):
                    return End.CRASHED, await link.wait_closed()
            except TimeoutError:
                look_s = retry_s
            if link.in_flight or not link.up:
                continue
            await self._examine_again(link, loaded)
            look_s = limits.canary_interval_s

    async def _examine_again(self, link: EngineLink, loaded: Loaded) -> None:
        accepted = link.accepted
        try:
            await self._examine(loaded)
        except EngineUnavailable:
            return  # the process died, which is seen by its closing
        except (DeadlineExceeded, Overloaded) as error:
            # Behind requests that came in between it may have had no turn; those are watched by themselves.
            if isinstance(error, DeadlineExceeded) and link.accepted - accepted <= 1:
                raise _CanaryUnanswered(error.message) from error
            log.info("canary of %s on %s put off: %s", self._spec.model_id, self._spec.device, error.message)
        except NodeError as error:
            raise _CanaryUnanswered(f"the known question was refused: {error.message}") from error

    async def _watch(self, link: EngineLink) -> None:
        while True:
            now = time.monotonic()
            try:
                link.kills.look(now, link.pid)
                reason, pause = link.liveness.look(link.seat.ran_until(now))
            except Exception as error:  # noqa: BLE001  (an engine without supervision may hang for ever)
                log.error("watching %s on %s failed: %s", self._spec.model_id, self._spec.device, type(error).__name__)
                reason, pause = None, _WATCH_AGAIN_S
            if reason is not None:
                link.kill_hung(reason)
                return
            await asyncio.sleep(pause)


# One process of an engine and the task that supervises it, from spawn until the process is gone.

Examine = Callable[[EngineLink], Awaitable[None]]


class EngineProcess:
    """A process just spawned.

    `ready` is done once it has been loaded and has passed its canary. `task` supervises it and returns how and why it
    ended. `on_ready` is called when `ready` is done.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: HostingLimits,
        link: EngineLink,
        examine: Examine,
        on_ready: Callable[[EngineProcess], None],
        slot: AbstractAsyncContextManager[object] = FREE,
    ) -> None:
        self._spec = spec
        self._ask = examine
        self._told = on_ready
        self.link = link
        self.loaded: Loaded | None = None
        self.proof: CanaryProof | None = None
        self.ready_at: float | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Its memory in bytes when it became ready, and when it was read last.
        self.base: int | None = None
        self.memory: int | None = None
        life = EngineLife(spec, limits, self._examine, self._on_ready, slot)
        self.task: asyncio.Task[tuple[End, str]] = asyncio.create_task(
            life.run(link), name=f"life of {spec.model_id} {link.pid}"
        )

    async def end(self, timeout: float, reason: str | None = None) -> None:
        """Ask it to end, kill it if it has not within `timeout` seconds, and wait until it is gone.

        Its jobs end with the `reason` at once; without one they end with the process, and are run again.
        """
        await self._unattended()
        await self.link.shut_down(timeout, reason)

    async def reap(self) -> None:
        """Wait until it is gone: it has ended or is ending now."""
        await self._unattended()
        status = await self.link.reap()
        log.info("engine %s on %s: exit status %s", self._spec.model_id, self._spec.device, status)

    async def _unattended(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _examine(self, loaded: Loaded) -> None:
        self.loaded = loaded
        await self._ask(self.link)
        self.proof = CanaryProof(time.time(), loaded.device_name, loaded.driver, loaded.runtime)

    def _on_ready(self) -> None:
        self.ready_at = time.monotonic()
        self._told(self)
        if not self.ready.done():
            self.ready.set_result(None)


# A job from its caller to an engine process and back, within its deadline.


class JobResults(Generic[R]):
    """The results of one job, see `Engine.run`. The job is submitted when the first result is requested.

    `find_link` returns the process that gets it then, or raises. With `suspect` the job may be blamed for the death of
    the process. An iterator and not a generator, because the event loop keeps a record of each generator that is
    started.
    """

    __slots__ = ("_ended", "_find_link", "_job", "_link", "_result", "_sink", "_suspect", "_timer")

    def __init__(self, find_link: Callable[[], EngineLink], job: Job, result: type[R], *, suspect: bool) -> None:
        self._find_link = find_link
        self._job = job
        self._result = result
        self._suspect = suspect
        self._sink = JobSink()
        self._link: EngineLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        if self._ended:
            raise StopAsyncIteration
        try:
            link = self._link or self._submit()
            received = await self._sink.next()
            result = _decoded(link, received.body, self._result)
        except BaseException:
            self._end()
            raise
        if received.last:
            self._end()
        return result

    async def aclose(self) -> None:
        """Cancel the job if it has not ended."""
        self._end()

    def _submit(self) -> EngineLink:
        link, job = self._find_link(), self._job
        link.submit(job, self._sink, suspect=self._suspect)
        self._link = link
        # One timer for the whole job: a stream has a result for each token.
        self._timer = asyncio.get_running_loop().call_later(max(0.0, job.deadline - time.monotonic()), self._late)
        return link

    def _late(self) -> None:
        self._sink.put(DeadlineExceeded("the deadline passed while the engine worked on the request"))

    def _end(self) -> None:
        """Cancel the job in the engine, if it still holds it."""
        self._ended = True
        link, self._link = self._link, None
        if link is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if link.forget(self._job.id):
            with contextlib.suppress(EngineUnavailable):
                link.send(Cancel(self._job.id))


def _decoded(link: EngineLink, body: msgspec.Raw, result: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(body, type=result)
    except msgspec.MsgspecError as error:
        link.kill(f"sent a result that cannot be read ({error})")
        raise EngineUnavailable("the engine sent a result that cannot be read; it is started again") from error
