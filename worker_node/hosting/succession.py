"""The processes of one engine: the one that serves, its successor while that loads, those that finish their requests.

A process whose memory has grown (`growth`) is replaced without losing a request. If memory allows a second process, new
requests go to the successor once it has passed its canary, and the old process ends after its last request. Otherwise
the old process ends when it is idle or is forced out, and requests wait for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.engines.base import EngineState
from worker_node.hosting.growth import GrowthPolicy, MemoryReading, Recycle
from worker_node.hosting.life import End, HostingLimits
from worker_node.hosting.process import EngineProcess
from worker_node.hosting.suspicion import BY_ITSELF, Blame

log = logging.getLogger(__name__)

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
