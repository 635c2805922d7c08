"""Which models are in memory, and until when: a model is loaded on demand and unloaded when it was idle for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from worker_node.engines.base import EngineState
from worker_node.errors import DeadlineExceeded
from worker_node.manager.served import ServedModel

_RETRY_S = 0.5
_LOADABLE = frozenset({EngineState.UNLOADED, EngineState.STARTING})


@dataclass(frozen=True, slots=True)
class _Kept:
    """How long a model stays after it became idle, counted from `since` at the earliest."""

    seconds: float
    since: float
    task: asyncio.Task[None]


@dataclass(slots=True)
class Residence:
    """Loads and unloads models. `clock` is monotonic seconds; `sleep` waits by that clock."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _kept: dict[str, _Kept] = field(default_factory=dict)

    async def load(self, model: ServedModel, deadline: float) -> float:
        """Have the model in memory; returns the seconds that it took. Raises DeadlineExceeded.

        A model whose engines cannot be loaded now is left to routing, which says why.
        """
        began = self.clock()
        preferred = model.placements[0]
        if model.serving() is not None or preferred.engine.status.state not in _LOADABLE:
            return 0.0
        preferred.engine.wake()
        try:
            async with asyncio.timeout(max(0.0, deadline - began)):
                await preferred.engine.settled()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the deadline passed while {model.id} was being loaded") from error
        return self.clock() - began

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """From now on unload the model when it has been idle for `seconds`; None keeps it for good."""
        self._forget(model)
        if seconds is not None:
            task = asyncio.create_task(self._expire(model), name=f"keep {model.id}")
            self._kept[model.id] = _Kept(seconds, self.clock(), task)

    def expires_in(self, model: ServedModel) -> float | None:
        """Seconds until the model is unloaded if nothing more is asked of it; None if it stays."""
        kept = self._kept.get(model.id)
        if kept is None:
            return None
        idle_since = model.activity.idle_since
        if idle_since is None:
            return kept.seconds
        return max(0.0, max(idle_since, kept.since) + kept.seconds - self.clock())

    async def unload(self, model: ServedModel) -> None:
        """Free the model's memory: now, or as soon as it runs nothing more."""
        self._forget(model)
        if not await self._unload_idle(model):
            self.keep(model, 0.0)

    async def close(self) -> None:
        """Plan nothing any more."""
        tasks = [kept.task for kept in self._kept.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kept.clear()

    def _forget(self, model: ServedModel) -> None:
        if (kept := self._kept.pop(model.id, None)) is not None:
            kept.task.cancel()

    async def _expire(self, model: ServedModel) -> None:
        while True:
            await model.activity.idle()
            if left := self.expires_in(model):
                await self.sleep(left)
            elif await self._unload_idle(model):
                break
            else:
                await self.sleep(_RETRY_S)
        self._kept.pop(model.id, None)

    @staticmethod
    async def _unload_idle(model: ServedModel) -> bool:
        """Unload every engine that is ready; False if one still has work, or is being loaded."""
        idle = model.activity.idle_since is not None
        for placement in model.placements:
            state = placement.engine.status.state
            if state is EngineState.READY:
                idle = await placement.engine.unload() and idle
            elif state is EngineState.STARTING:
                idle = False
        return idle
