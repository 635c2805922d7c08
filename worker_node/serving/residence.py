"""Which models are in memory, and until when: loaded at a request's word, kept for a while, unloaded after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker_node.engines.base import EngineState
from worker_node.errors import DeadlineExceeded
from worker_node.serving.registry import ServedModel

_RETRY_S = 0.5
_LOADABLE = frozenset({EngineState.UNLOADED, EngineState.STARTING})


@dataclass(slots=True)
class Residence:
    """Loads and unloads models. `clock` is monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    _until: dict[str, float] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

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
        if seconds is None:
            return
        self._until[model.id] = self.clock() + seconds
        self._tasks[model.id] = asyncio.create_task(self._expire(model), name=f"keep {model.id}")

    def expires_in(self, model: ServedModel) -> float | None:
        """Seconds until the model is unloaded; None if it stays."""
        until = self._until.get(model.id)
        return None if until is None else max(0.0, until - self.clock())

    async def unload(self, model: ServedModel) -> None:
        """Free the model's memory: now, or as soon as it runs nothing more."""
        self._forget(model)
        if not await self._unload_idle(model):
            self.keep(model, 0.0)

    async def close(self) -> None:
        """Plan nothing any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._until.clear()

    def _forget(self, model: ServedModel) -> None:
        self._until.pop(model.id, None)
        if (task := self._tasks.pop(model.id, None)) is not None:
            task.cancel()

    async def _expire(self, model: ServedModel) -> None:
        await asyncio.sleep(max(0.0, self._until[model.id] - self.clock()))
        while True:
            if await self._unload_idle(model):
                break
            await asyncio.sleep(_RETRY_S)
        self._until.pop(model.id, None)
        self._tasks.pop(model.id, None)

    @staticmethod
    async def _unload_idle(model: ServedModel) -> bool:
        """Unload every engine that is ready; False if one still has work."""
        idle = True
        for placement in model.placements:
            if placement.engine.status.state is EngineState.READY:
                idle = await placement.engine.unload() and idle
        return idle
