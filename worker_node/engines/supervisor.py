"""The processes of one engine: the one that serves, its successor while that loads, those that finish their requests.

A process whose memory has grown (`growth`) is replaced without losing a request. If memory allows a second process, new
requests go to the successor once it has passed its canary, and the old process ends after its last request. Otherwise
the old process ends when it is idle or is forced out, and requests wait for the next one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from worker_node.core.errors import EngineUnavailable
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.engines.cpu_share import ALONE, CpuPlace
from worker_node.engines.isolation import BY_ITSELF, Blame, Suspects
from worker_node.engines.process import (
    FREE,
    Canary,
    End,
    EngineLink,
    EngineProcess,
    HostingLimits,
    JobResults,
    KillWatch,
)
from worker_node.engines.protocol import EngineSpec, EngineState, EngineStats, EngineStatus, Job, R
from worker_node.engines.restart import GrowthPolicy, MemoryReading, Recycle, RestartPolicy, RestartVerdict
from worker_node.engines.watchdog import CallTimes, Liveness

# Between looks at the memory of an idle engine, in times of those at a busy one.
_IDLE_LOOKS = 5
_MB = 1e6


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """How and why the last serving process ended, and how long after it became ready (0: it never did)."""

    end: End
    reason: str
    served_s: float = 0.0
    blame: Blame = BY_ITSELF
    from_outside: bool = False


class Succession:
    """Runs the processes of the engine `name`. `notify` is called with each new state; see `serve`.

    `spawn` starts a process, and calls `became_ready` for it.
    """

    def __init__(
        self,
        name: str,
        limits: HostingLimits,
        spawn: Callable[[], Awaitable[EngineProcess]],
        notify: Callable[[EngineState, str | None], None],
        memory: MemoryReader = KERNEL,
    ) -> None:
        self._name = name
        self._limits = limits
        self._spawn = spawn
        self._notify = notify
        self._memory = memory
        self._policy = GrowthPolicy(limits.growth)
        self._heir: EngineProcess | None = None
        self._retiring: dict[EngineProcess, asyncio.Task[None]] = {}
        self._reaping: set[asyncio.Task[None]] = set()
        self._closing = False
        self.current: EngineProcess | None = None
        # The one that serves or served last.
        self.last: EngineProcess | None = None
        self.recycles: Counter[Recycle] = Counter()
        self.shapes: Counter[str] = Counter()
        # Whether the process that is being started replaces one that was ended for its memory.
        self.replacing = False

    @property
    def in_flight(self) -> int:
        """The jobs of all processes, but for what the canary asks of a successor."""
        return sum(process.link.in_flight for process in (self.current, *self._retiring) if process is not None)

    @property
    def heir_loads(self) -> bool:
        """Whether a successor is being loaded, with which the next `serve` would start."""
        return self._heir is not None and not self._heir.task.done()

    async def serve(self) -> EngineEnd:
        """Serve with one process, or several after one another, until the last of them ends."""
        process = await self._first()
        try:
            while True:
                await self._change(process)
                if process.task.done():
                    end, reason = process.task.result()
                    served_s = 0.0 if process.ready_at is None else time.monotonic() - process.ready_at
                    link = process.link
                    return EngineEnd(end, reason, served_s, link.blame, link.killed_from_outside)
                if self._heir is not None and self._heir.task.done():
                    self._heir_failed(self._heir)
                elif self._heir is not None and self._heir.ready.done():
                    process = self._hand_over(process, self._heir)
                else:
                    how, grown = self._decide(process)
                    if how is Recycle.BESIDE:
                        await self._load_heir(process, grown)
                    elif how is not None:
                        return await self._give_way(process, how, grown)
        finally:
            if not self._closing:
                if self.current is process:
                    self.current = None
                if process not in self._retiring:
                    # Being stopped in the middle must not leave a process without supervision.
                    await asyncio.shield(self._reap(process))

    async def discard_heir(self) -> None:
        """End a successor that is being loaded."""
        heir, self._heir = self._heir, None
        if heir is not None:
            heir.link.kill("it is not needed any more", blameless=True)
            await asyncio.shield(self._reap(heir))

    async def close(self, reason: str) -> None:
        """End all processes, and their jobs with the `reason`; `serve` has been cancelled, after `closing`."""
        for task in self._retiring.values():
            task.cancel()
        processes = {process for process in (self.current, self._heir, *self._retiring) if process is not None}
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)
        await asyncio.gather(*(process.end(self._limits.stop_timeout_s, reason) for process in processes))
        self.current = self._heir = None
        await asyncio.gather(*self._reaping)

    def closing(self) -> None:
        """Leave it to `close` to end the processes from now on."""
        self._closing = True

    def became_ready(self, process: EngineProcess) -> None:
        """Record that a process has passed its first canary."""
        process.base = process.memory = self._read(process)
        if process.loaded is not None:
            self.shapes.update(compiled=process.loaded.compiled, imported=process.loaded.imported)
        if process is self.current:
            self._serves()

    def distrust(self) -> None:
        """Record that the process that served last gave wrong answers."""
        if self.last is not None:
            self.last.proof = None

    def _serves(self) -> None:
        self.last = self.current
        self.replacing = False
        self._policy.succeeded()
        self._notify(EngineState.READY, None)

    async def _first(self) -> EngineProcess:
        """The successor if there is one, else a new process."""
        process = self._heir
        if process is None:
            process = await self._spawn()
        self._heir, self.current = None, process
        if process.ready.done() and not process.task.done():
            self._serves()
        return process

    async def _change(self, process: EngineProcess) -> None:
        """Wait until a process changes, or until the memory is due to be read."""
        waits: list[asyncio.Future[Any]] = [process.task]
        if not process.ready.done():
            waits.append(process.ready)
        if self._heir is not None:
            waits += [self._heir.task, self._heir.ready]
        idle: asyncio.Task[None] | None = None
        if self._heir is None and process.link.in_flight and self._policy.outgrown(self._grown(process)):
            idle = asyncio.create_task(process.link.drained())
            waits.append(idle)
        growth = self._limits.growth
        try:
            # An idle engine does not grow, and each look wakes an idle node.
            look_s = growth.look_s if process.link.in_flight else _IDLE_LOOKS * growth.look_s
            timeout = None if growth.growth is None else look_s
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if idle is not None:
                idle.cancel()

    def _read(self, process: EngineProcess) -> int | None:
        pid = process.link.pid
        return None if pid is None else self._memory.own(pid)

    @staticmethod
    def _grown(process: EngineProcess) -> int:
        if process.base is None or process.memory is None:
            return 0
        return max(0, process.memory - process.base)

    def _decide(self, process: EngineProcess) -> tuple[Recycle | None, int]:
        """How to replace the process now, if at all, and by how many bytes it has grown."""
        if not process.ready.done() or self._limits.growth.growth is None:
            return None, 0
        process.memory = self._read(process)
        grown = self._grown(process)
        if process.base is None or not self._policy.outgrown(grown):
            return None, grown
        reading = MemoryReading(
            base=process.base,
            grown=grown,
            available=self._memory.available(),
            idle=not process.link.in_flight,
            loading=self._heir is not None,
            retiring=bool(self._retiring),
        )
        return self._policy.decide(time.monotonic(), reading), grown

    async def _load_heir(self, process: EngineProcess, grown: int) -> None:
        log.info(
            "engine %s: pid %s has grown by %.0f MB since it was ready; a successor is loaded beside it",
            self._name,
            process.link.pid,
            grown / _MB,
        )
        try:
            self._heir = await self._spawn()
        except Exception as error:
            # Whatever kept the successor from being started must not end the process that serves.
            log.exception("engine %s: no successor could be started", self._name)
            self._failed(type(error).__name__)

    def _heir_failed(self, heir: EngineProcess) -> None:
        self._heir = None
        error = heir.task.exception()
        self._failed(f"{type(error).__name__}: {error}" if error is not None else heir.task.result()[1])
        self._reap(heir)

    def _failed(self, reason: str) -> None:
        self.recycles[Recycle.FAILED] += 1
        wait = self._policy.failed(time.monotonic())
        log.warning("engine %s: its successor failed: %s; the next is tried in %.0f s", self._name, reason, wait)

    def _hand_over(self, process: EngineProcess, heir: EngineProcess) -> EngineProcess:
        """Send requests to the successor from now on."""
        self._heir, self.current = None, heir
        self.recycles[Recycle.BESIDE] += 1
        log.info(
            "engine %s: pid %s has taken over from pid %s, which finishes %d requests",
            self._name,
            heir.link.pid,
            process.link.pid,
            process.link.in_flight,
        )
        self._retire(process, None)
        self._serves()
        return heir

    async def _give_way(self, process: EngineProcess, how: Recycle, grown: int) -> EngineEnd:
        """Take the process out of service; it is gone on return, unless a successor is being loaded already."""
        self.recycles[how] += 1
        self.replacing = True
        self.current = None
        reason = f"it is replaced ({how}), since its memory has grown by {grown / _MB:.0f} MB"
        log.info("engine %s: %s", self._name, reason)
        self._notify(EngineState.STARTING, reason)
        # Without a successor whoever comes next waits for these requests, so they get a limited time.
        retired = self._retire(process, None if self.heir_loads else self._limits.growth.drain_s)
        if not self.heir_loads:
            await asyncio.shield(retired)
        return EngineEnd(End.OUTGROWN, reason)

    def _retire(self, process: EngineProcess, limit_s: float | None) -> asyncio.Task[None]:
        task = asyncio.create_task(self._drain(process, limit_s), name=f"retire {self._name}")
        self._retiring[process] = task
        task.add_done_callback(lambda _: self._retiring.pop(process, None))
        return task

    async def _drain(self, process: EngineProcess, limit_s: float | None) -> None:
        """Let a process finish its jobs, within so many seconds, and end it."""
        drained = asyncio.create_task(process.link.drained())
        try:
            await asyncio.wait({drained, process.task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if process.link.in_flight:
            process.link.kill("its memory had grown too much and it is replaced", blameless=True)
        pid = process.link.pid
        await process.end(self._limits.stop_timeout_s)
        log.info("engine %s: pid %s, which was replaced, has ended", self._name, pid)

    def _reap(self, process: EngineProcess) -> asyncio.Task[None]:
        task = asyncio.create_task(process.reap(), name=f"reap {self._name}")
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)
        return task


# Keeps one engine alive over many lives of its process; it is the `Engine` that the node calls.
#
# A closed socket shows a death, `liveness.py` a hang. After either, the engine is started again as `restart.py`
# decides.
# It is `ready` only after its canary has passed; a canary that fails, then or later, quarantines the engine at once. A
# process whose memory grows is replaced (`succession.py`), which does not count as a failure.

log = logging.getLogger(__name__)

# Set in the canary's context, to the process that it examines. Its questions are known to be harmless, so no death of
# an engine is theirs.
_examined: ContextVar[EngineLink | None] = ContextVar("examined", default=None)
_UNLOADABLE = frozenset({EngineState.READY, EngineState.BACKING_OFF, EngineState.QUARANTINED, EngineState.FAILED})


class SupervisedEngine:
    """An `Engine` in a child process that is restarted when it dies or hangs.

    A `lazy` one stays unloaded until `wake` is called. Its processes load while they hold `slot`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        canary: Canary,
        limits: HostingLimits,
        *,
        lazy: bool = False,
        slot: AbstractAsyncContextManager[object] = FREE,
        suspects: Suspects | None = None,
        memory: MemoryReader = KERNEL,
        cpu: CpuPlace = ALONE,
    ) -> None:
        self.spec = spec
        self._cpu = cpu
        self.lazy = lazy
        self._slot = slot
        self._memory = memory
        self._canary = canary
        self._limits = limits
        self._policy = RestartPolicy(limits.restart)
        self._times = CallTimes()
        self._suspects = Suspects() if suspects is None else suspects
        self._ids = itertools.count(1)
        self._state = EngineState.UNLOADED if lazy else EngineState.STARTING
        self._reason: str | None = "it is loaded when first needed" if lazy else "loading"
        self._name = f"{spec.model_id} on {spec.device}"
        self._succession = Succession(self._name, limits, self._spawn, self._set, memory)
        self._restarts = 0
        self._wrong = 0
        self._resume_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        retry_after = None if self._resume_at is None else max(0.1, self._resume_at - time.monotonic())
        state, reason = self._state, self._reason
        process, last = self._succession.current, self._succession.last
        loaded = last.loaded if last else None
        if state is EngineState.READY and not self.ready:
            # The process has just died and the supervising task has not had its turn yet.
            state, reason = EngineState.BACKING_OFF, "the engine process died"
        return EngineStatus(
            state=state,
            reason=reason,
            pid=process.link.pid if process else None,
            restarts=self._restarts,
            wrong=self._wrong,
            load_seconds=loaded.seconds if loaded else None,
            device_name=loaded.device_name if loaded else None,
            retry_after=retry_after,
            in_flight=self._succession.in_flight,
            proof=last.proof if last else None,
            stats=process.link.stats if process else EngineStats(),
            replacing=self._succession.replacing and state is EngineState.STARTING,
            served=last is not None,
            recycles={how.value: count for how, count in self._succession.recycles.items()},
            shapes=dict(self._succession.shapes),
        )

    @property
    def ready(self) -> bool:
        """See `Engine.ready`."""
        process = self._succession.current
        return self._state is EngineState.READY and process is not None and process.link.up

    def start(self) -> None:
        """Begin to run and supervise the engine process; a lazy one waits for `wake`."""
        if not self.lazy:
            self._begin()

    def wake(self) -> None:
        """Start to load the engine if it is not loaded; return at once (`settled` waits)."""
        if self._state is EngineState.UNLOADED:
            self._begin()

    def _begin(self) -> None:
        self._set(EngineState.STARTING, "loading")
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.model_id}")

    async def unload(self) -> bool:
        """End the process until `wake` is called; False, and nothing done, while it holds jobs or is being loaded."""
        if self._task is None or self._state not in _UNLOADABLE or self.status.in_flight:
            return False
        self._resume_at = None
        self._set(EngineState.UNLOADED, "it was unloaded; it is loaded again when needed")
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def settled(self) -> EngineStatus:
        """See `Engine.settled`."""
        while self._state is EngineState.STARTING:
            await self.next_change()
        return self.status

    def next_change(self) -> Coroutine[None, None, object]:
        """See `Engine.next_change`."""
        return self._changed.wait()

    async def stop(self, reason: str = "the node is shutting down") -> None:
        """See `Engine.stop`."""
        self._set(EngineState.STOPPED, reason)
        self._succession.closing()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._succession.close(reason)

    def _set(self, state: EngineState, reason: str | None) -> None:
        if self._state is not EngineState.STOPPED:
            self._state, self._reason = state, reason
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _supervise(self) -> None:
        try:
            while True:
                await self._serve_once()
        finally:
            if self._state is not EngineState.STOPPED:
                await self._succession.discard_heir()

    async def _serve_once(self) -> None:
        """Serve until a process ends by itself or is replaced, then return to the initial state."""
        try:
            outcome = await self._succession.serve()
        except Exception as error:
            # Whatever it was, an engine without supervision would be lost for the life of the node.
            log.exception("engine %s: its supervision failed", self._name)
            outcome = EngineEnd(End.CRASHED, f"its supervision failed ({type(error).__name__}; the log has more)")
        if outcome.end is End.OUTGROWN:
            return
        self._succession.replacing = False
        if outcome.end is End.HOPELESS:
            log.error("engine %s %s", self._name, outcome.reason)
            # A driver may come up, memory may become free, a file may be repaired while the node runs.
            await self._pause(EngineState.FAILED, outcome.reason, self._limits.restart.quarantine_s)
            return
        verdict = self._judge(outcome)
        if verdict.quarantined:
            self._suspects.clear()
            await self._succession.discard_heir()
        elif self._succession.heir_loads:
            log.warning("engine %s ended: %s; its successor is being loaded", self._name, verdict.reason)
            self._succession.replacing = True
            self._set(EngineState.STARTING, f"its successor is being loaded after: {verdict.reason}")
            return
        log.warning("engine %s ended: %s; next start in %.1f s", self._name, verdict.reason, verdict.delay)
        state = EngineState.QUARANTINED if verdict.quarantined else EngineState.BACKING_OFF
        await self._pause(state, verdict.reason, verdict.delay)

    def _judge(self, outcome: EngineEnd) -> RestartVerdict:
        """Count an unrequested end, and decide when to start again."""
        self._restarts += 1
        if outcome.end is End.WRONG:
            self._succession.distrust()
            self._wrong += 1
            return self._policy.distrusted(outcome.reason)
        if outcome.blame.request:
            return self._policy.blameless(outcome.reason, pardons=outcome.blame.pardons)
        if outcome.from_outside:
            return self._policy.killed(outcome.reason, served_s=outcome.served_s)
        return self._policy.crashed(time.monotonic(), outcome.reason, served_s=outcome.served_s)

    async def _pause(self, state: EngineState, reason: str, delay: float) -> None:
        """Be in `state` for `delay` seconds, then start again."""
        self._resume_at = time.monotonic() + delay
        self._set(state, reason)
        await asyncio.sleep(delay)
        self._resume_at = None
        self._set(EngineState.STARTING, "starting again after: " + reason)

    async def _spawn(self) -> EngineProcess:
        liveness = Liveness(self._limits.liveness, self._times, time.monotonic())
        link = await EngineLink.spawn(self.spec, liveness, self._suspects, KillWatch(self._memory), self._cpu)
        return EngineProcess(self.spec, self._limits, link, self._examine, self._succession.became_ready, self._slot)

    async def _examine(self, link: EngineLink) -> None:
        """Ask the canary of one process, which need not be the one that serves."""
        token = _examined.set(link)
        try:
            await self._canary(self)
        finally:
            _examined.reset(token)

    def _link(self) -> EngineLink:
        """Where a job goes: to the process that is examined, in its canary, else to the one that serves."""
        examined, process = _examined.get(), self._succession.current
        link = examined or (None if process is None else process.link)
        if link is None or self._state in {EngineState.STOPPED, EngineState.FAILED}:
            raise EngineUnavailable(
                f"{self.spec.model_id} on {self.spec.device}: {self._reason}",
                retry_after=self.status.retry_after,
            )
        return link

    def run(self, job: Job, result: type[R]) -> JobResults[R]:
        """See `Engine.run`."""
        return JobResults(self._link, job.with_id(next(self._ids)), result, suspect=_examined.get() is None)
