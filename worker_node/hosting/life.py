"""One life of one engine process: spawn, load, canary, supervision, end.

The canary runs before the engine counts as ready, and again at intervals while the engine is idle: a device that
computes garbage raises no error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from worker_node.core.errors import DeadlineExceeded, EngineUnavailable, NodeError, Overloaded
from worker_node.engines.base import Engine
from worker_node.engines.messages import EngineSpec, Loaded
from worker_node.hosting.growth import GrowthLimits
from worker_node.hosting.link import EngineLink, LoadRefused
from worker_node.hosting.liveness import LivenessLimits
from worker_node.hosting.loading import LoadWatch, activity_of
from worker_node.hosting.restart import RestartLimits
from worker_node.hosting.slots import FREE

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
