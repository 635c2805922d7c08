"""One process of an engine and the task that supervises it, from spawn until the process is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from worker_node.engines.base import CanaryProof
from worker_node.engines.messages import EngineSpec, Loaded
from worker_node.hosting.life import End, EngineLife, HostingLimits
from worker_node.hosting.link import EngineLink
from worker_node.hosting.slots import FREE

log = logging.getLogger(__name__)

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
