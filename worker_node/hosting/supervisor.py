"""Keeps one engine alive over many lives of its process; it is the `Engine` that the node calls.

A closed socket shows a death, `liveness.py` a hang. After either, the engine is started again as `restart.py` decides.
It is `ready` only after its canary has passed; a canary that fails, then or later, quarantines the engine at once. A
process whose memory grows is replaced (`succession.py`), which does not count as a failure.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar

from worker_node.core.errors import EngineUnavailable
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.engines.base import EngineState, EngineStatus, R
from worker_node.engines.messages import EngineSpec, EngineStats, Job
from worker_node.hosting.calls import JobResults
from worker_node.hosting.cpu_turns import ALONE, CpuPlace
from worker_node.hosting.killing import KillWatch
from worker_node.hosting.life import Canary, End, HostingLimits
from worker_node.hosting.link import EngineLink
from worker_node.hosting.liveness import CallTimes, Liveness
from worker_node.hosting.process import EngineProcess
from worker_node.hosting.restart import RestartPolicy, RestartVerdict
from worker_node.hosting.slots import FREE
from worker_node.hosting.succession import EngineEnd, Succession
from worker_node.hosting.suspicion import Suspects

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
        if outcome.blame:
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
