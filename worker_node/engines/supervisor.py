"""Keeps one engine alive over many lives of its process; it is the `Engine` that the node calls.

Spawn, load, canary, ready; when the process dies, hangs or grows too large, the next one, as `restart` decides. The
canary runs before the engine counts as ready, and again at intervals while it is idle: a device that computes garbage
raises no error. A canary that fails quarantines the engine at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from worker_node.core.errors import DeadlineExceeded, EngineDied, EngineUnavailable, NodeError, Overloaded
from worker_node.core.operating_system import since_boot
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import Canary, CanaryFailed, EngineLimits, EngineProcess, LoadRefused, Prewarm
from worker_node.engines.protocol import (
    EngineSpec,
    EngineState,
    EngineStats,
    EngineStatus,
    Job,
    Loaded,
    R,
    ResultStream,
)
from worker_node.engines.restart import Pause, RestartPolicy
from worker_node.engines.watchdog import Blame, Death

log = logging.getLogger(__name__)

_MB = 1e6
# So many processes may end while they fill their prefix cache.
_PREWARM_DEATHS = 2
# Of the files that engines load.
_LOADED = (".xml", ".bin", ".json", ".jinja", ".onnx")


class Engine:
    """An engine in a child process that is restarted when it dies or hangs.

    It stays unloaded until `wake` is called. It loads the files that were there when it was made, with the driver and
    the OpenVINO in `proven_with` if there are some, and no others: what the node knows of the model, such as the space
    of its vectors and its certified limit, holds for those alone. After `recoveries` of the device, what ran meanwhile
    was aborted, whether or not its call failed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        canary: Canary,
        limits: EngineLimits,
        *,
        prewarm: Prewarm | None = None,
        suspects: Suspects | None = None,
        proven_with: tuple[str, str] | None = None,
        memory: MemoryReader = KERNEL,
    ) -> None:
        self.spec = spec
        self._name = f"{spec.model_id} on {spec.device}"
        self._canary = canary
        self._prewarm = prewarm
        self._prewarm_deaths = 0
        self._prewarmed: Literal["running", "done", "failed"] | None = None
        self._limits = limits
        self._suspects = Suspects() if suspects is None else suspects
        self._memory = memory
        self._policy = RestartPolicy(limits.restart)
        self._files = file_stamps(spec.path)
        self._proven_with = proven_with
        self._stale = False
        self._state = EngineState.UNLOADED
        self._reason: str | None = "it is loaded when first needed"
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: EngineProcess | None = None
        # Of the process that serves, or served last.
        self._loaded: Loaded | None = None
        self._proven_at: float | None = None
        self._ready_at: float | None = None
        self._memory_when_ready: int | None = None
        self._resume_at: float | None = None
        self._restarts = 0
        self._wrong = 0
        self._replacing = False
        self._recycles: Counter[str] = Counter()
        self._shapes: Counter[str] = Counter()
        self._doubted = asyncio.Event()
        self.recoveries = 0

    @property
    def status(self) -> EngineStatus:
        retry_after = None if self._resume_at is None else max(0.1, self._resume_at - time.monotonic())
        state, reason = self._state, self._reason
        process = self._process
        if state is EngineState.READY and not self.ready:
            # The process has just died and the supervising task has not had its turn yet.
            state, reason, process = EngineState.BACKING_OFF, "the engine process died", None
        return EngineStatus(
            state=state,
            reason=reason,
            pid=process.pid if process else None,
            restarts=self._restarts,
            wrong=self._wrong,
            loaded=self._loaded,
            proven_at=self._proven_at,
            retry_after=retry_after,
            in_flight=process.in_flight if process else 0,
            stats=process.stats if process else EngineStats(),
            replacing=self._replacing and state is EngineState.STARTING,
            stale=self._stale,
            recycles=dict(self._recycles),
            shapes=dict(self._shapes),
            prewarm=self._prewarmed if state is EngineState.READY else None,
        )

    @property
    def ready(self) -> bool:
        """Whether its state is `ready`. Every request asks, and a whole status costs many times as much."""
        return self._state is EngineState.READY and self._process is not None and self._process.up

    def wake(self) -> None:
        """Start to load the engine if it is not loaded; return at once (`settled` waits)."""
        if self._state is EngineState.UNLOADED:
            self._set(EngineState.STARTING, "loading")
            self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.model_id}")

    async def unload(self) -> bool:
        """End the process until `wake` is called; False, and nothing done, while it holds jobs or is being loaded."""
        if self._task is None or self._state.loadable or self._state is EngineState.STOPPED or self.status.in_flight:
            return False
        self._set(EngineState.UNLOADED, "it was unloaded; it is loaded again when needed")
        await self._end("it is unloaded")
        return True

    async def stop(self, reason: str = "the node is shutting down") -> None:
        self._set(EngineState.STOPPED, reason)
        await self._end(reason)

    async def settled(self) -> EngineStatus:
        while self._state is EngineState.STARTING:
            await self.next_change()
        return self.status

    def next_change(self) -> Coroutine[None, None, object]:
        """Return what to await for the first change of state after this call."""
        return self._changed.wait()

    def run(self, job: Job, result: type[R]) -> ResultStream[R]:
        process = self._process
        if process is None or not self.ready:
            status = self.status
            return _failing(EngineUnavailable(f"{self._name}: {status.reason}", retry_after=status.retry_after))
        return process.run(job, result, suspect=True)

    async def _end(self, reason: str) -> None:
        """End supervision and process. In a task of its own: a caller that leaves must not leave a process behind."""
        self._resume_at = None
        task, self._task = self._task, None

        async def end() -> None:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            process, self._process = self._process, None
            if process is not None:
                await process.end(reason)

        await asyncio.shield(asyncio.create_task(end(), name=f"end {self._name}"))

    def _set(self, state: EngineState, reason: str | None) -> None:
        if self._state is not EngineState.STOPPED:
            self._state, self._reason = state, reason
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _supervise(self) -> None:
        while True:
            try:
                pause = await self._one_process()
            except LoadRefused as error:
                reason = f"cannot be loaded: {error}"
                log.error("engine %s %s", self._name, reason)
                # A driver may come up, memory may become free, a file may be repaired while the node runs.
                restart = self._limits.restart
                seconds = restart.max_backoff_s if self._stale else restart.quarantine_s
                pause = Pause(EngineState.FAILED, reason, seconds)
            except Exception as error:
                # Whatever it was, an engine without supervision would be lost for the life of the node.
                log.exception("engine %s: its supervision failed", self._name)
                reason = f"its supervision failed ({type(error).__name__}; the log has more)"
                if self._process is not None:
                    self._process.kill(reason, Blame.NODE)
                pause = self._ended(self._policy.crashed(time.monotonic(), reason))
            if self._process is not None:
                await self._process.reap()
                self._process = None
            self._ready_at = None
            if pause is not None:
                self._replacing = False
                self._restarts += pause.state is not EngineState.FAILED
                self._resume_at = time.monotonic() + pause.seconds
                self._set(pause.state, pause.reason)
                await asyncio.sleep(pause.seconds)
                self._resume_at = None
                self._set(EngineState.STARTING, "starting again after: " + pause.reason)

    async def _one_process(self) -> Pause | None:
        """Load and serve with one process; return the pause before the next one, if any. Raises LoadRefused."""
        await self._require_unchanged()
        process = await EngineProcess.spawn(self.spec, self._limits, self._suspects, self._memory)
        self._process = process
        try:
            loaded = await process.load()
            await self._require_unchanged(loaded)
        except TimeoutError:
            return self._pause_after_end(await process.wait_closed())
        except EngineDied:
            what = "" if self.spec.loads is None else f" {self.spec.loads}"
            death = await process.wait_closed()
            return self._pause_after_end(replace(death, reason=f"{death.reason} while loading{what}"))
        watchdog = asyncio.create_task(process.watch(), name=f"watchdog {self.spec.model_id}")
        prewarming = None
        try:
            await self._canary(process)
            self._loaded = loaded
            self._proven_at = time.time()
            self._ready_at = time.monotonic()
            self._memory_when_ready = self._own_memory(process)
            self._shapes.update(compiled=loaded.compiled, imported=loaded.imported)
            self._replacing = False
            log.info("engine %s is ready, pid %s", self._name, process.pid)
            self._set(EngineState.READY, None)
            if self._prewarm is not None and self._prewarm_deaths < _PREWARM_DEATHS:
                self._prewarmed = "running"
                prewarming = asyncio.create_task(self._warm(process, self._prewarm), name=f"prewarm {self._name}")
            if await self._serve(process):
                return None
        except CanaryFailed as error:
            process.kill(f"its known question was answered wrongly: {error}", Blame.NODE)
            self._proven_at = None
            self._wrong += 1
            return self._ended(self._policy.quarantine((await process.wait_closed()).reason))
        except NodeError as error:
            how = "could not be run" if self._ready_at is None else "got no answer"
            process.kill(f"its known question {how}: {error.message}", Blame.NODE)
        finally:
            watchdog.cancel()
            if prewarming is not None:
                prewarming.cancel()
        return self._pause_after_end(await process.wait_closed())

    async def _warm(self, process: EngineProcess, prewarm: Prewarm) -> None:
        began = time.monotonic()
        try:
            await prewarm(process)
        except EngineUnavailable:
            # What ends its engine each time must not keep it from serving.
            self._prewarm_deaths += 1
            self._prewarmed = "failed"
            log.warning("engine %s ended while it computed what prewarm names", self._name)
        except NodeError as error:
            self._prewarmed = "failed"
            log.warning("engine %s: prewarm was not completed: %s", self._name, error.message)
        else:
            self._prewarmed = "done"
            log.info("engine %s computed what prewarm names in %.1f s", self._name, time.monotonic() - began)

    async def _require_unchanged(self, loaded: Loaded | None = None) -> None:
        """Raise LoadRefused if what the node knows of the model does not hold for what is there now."""
        changed = ""
        if await asyncio.to_thread(file_stamps, self.spec.path) != self._files:
            changed = "its files have"
        elif loaded is not None and self._proven_with is not None:
            found = (loaded.driver, loaded.openvino)
            if any(version not in {None, known} for version, known in zip(found, self._proven_with, strict=True)):
                changed = "the driver or OpenVINO, on which its passport depends, has"
        self._stale = bool(changed)
        if changed:
            raise LoadRefused(
                f"{changed} changed since the node read the model; the node reads it again, the bounded profile after "
                "a restart"
            )

    def _pause_after_end(self, death: Death) -> Pause:
        served_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        if death.blame is Blame.REQUEST:
            return self._ended(self._policy.blameless(death.reason))
        if death.blame is Blame.OUTSIDE:
            return self._ended(self._policy.killed(death.reason, served_s=served_s))
        return self._ended(self._policy.crashed(time.monotonic(), death.reason, served_s=served_s))

    def _ended(self, pause: Pause) -> Pause:
        if pause.state is EngineState.QUARANTINED:
            self._suspects.clear()
        log.warning("engine %s ended: %s; next start in %.1f s", self._name, pause.reason, pause.seconds)
        return pause

    def device_recovered(self) -> None:
        """Count a recovery of the device: an engine with work is replaced, an idle one answers its canary again."""
        self.recoveries += 1
        process = self._process
        if process is not None and process.in_flight:
            # As for a call that failed: one of its requests may be what hung the device.
            process.kill("the kernel recovered the NPU, which aborts the jobs of all processes")
        else:
            self._doubted.set()

    async def _serve(self, process: EngineProcess) -> bool:
        """Look after a ready process until it ends; return whether its growth ended it. Raises CanaryFailed."""
        interval, growth = self._limits.canary_interval_s, self._limits.growth
        # After a sleep of the machine, too, the canary is due as soon as it would have been without.
        canary_at = since_boot() + interval
        # What was doubted before it was loaded has been examined by that.
        self._doubted.clear()
        closed = asyncio.ensure_future(process.wait_closed())
        closed.add_done_callback(lambda _: self._doubted.set())
        try:
            while True:
                look_s = math.inf if growth.growth is None else growth.look_s
                # A busy process is examined later; before a canary is due there is nothing to look for.
                canary_s = max(min(1.0, interval), canary_at - since_boot())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(look_s, canary_s)):
                        await self._doubted.wait()
                        if closed.done():
                            return False
                        self._doubted.clear()
                        canary_at = since_boot()
                if process.in_flight == 0 and process.up and since_boot() >= canary_at:
                    await self._examine_again(process)
                    canary_at = since_boot() + interval
                grown = (self._own_memory(process) or 0) - (self._memory_when_ready or 0)
                form = growth.replacement(grown, idle=not process.in_flight)
                if form is not None and process.up:
                    await self._replace(process, form, grown)
                    return True
        finally:
            closed.cancel()

    async def _examine_again(self, process: EngineProcess) -> None:
        accepted = process.accepted
        try:
            await self._canary(process)
        except EngineUnavailable:
            return  # the process died, which is seen by its closing
        except (DeadlineExceeded, Overloaded) as error:
            # Behind requests that came in between it may have had no turn; those are watched by themselves.
            if isinstance(error, DeadlineExceeded) and process.accepted - accepted <= 1:
                raise
            log.info("the known question of %s is asked later: %s", self._name, error.message)
        else:
            self._proven_at = time.time()

    async def _replace(self, process: EngineProcess, form: str, grown: int) -> None:
        """End a process that has grown too large; requests wait for the next one."""
        self._recycles[form] += 1
        self._replacing = True
        reason = f"it is replaced ({form}), since its memory has grown by {grown / _MB:.0f} MB"
        log.info("engine %s: %s", self._name, reason)
        self._set(EngineState.STARTING, reason)
        await process.drain(self._limits.growth.drain_s)
        if process.in_flight:
            process.kill("its memory had grown too much and it is replaced", Blame.NODE)
        await process.end()

    def _own_memory(self, process: EngineProcess) -> int | None:
        return None if process.pid is None else self._memory.own(process.pid)


def file_stamps(directory: str) -> frozenset[tuple[str, int, int, int]]:
    """What changes with the content of a model's files; nothing of a directory that cannot be read.

    Not the time of the last status change: a backup that links the files, or a chmod, changes no content.
    """
    try:
        # Windows leaves the inode out of the entries of a directory.
        found = [(path.name, path.stat()) for path in Path(directory).iterdir() if path.name.endswith(_LOADED)]
    except OSError:
        return frozenset()
    return frozenset((name, it.st_size, it.st_mtime_ns, it.st_ino) for name, it in found)


async def _failing(error: NodeError) -> AsyncGenerator[Any, None]:
    raise error
    yield  # an asynchronous generator has one
