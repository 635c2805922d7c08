"""Pulls in progress: one for each model, however many callers want it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from worker_node.core.errors import DownloadFailed, NodeError, Overloaded
from worker_node.core.types import Progress

log = logging.getLogger(__name__)

# Each is a process that downloads and converts.
_MOST = 8
_RETRY_S = 30.0

Pull = Callable[[str, Progress], Awaitable[None]]


@dataclass(slots=True)
class _Listeners:
    """Passes progress to all callers of one pull."""

    all: list[Progress] = field(default_factory=list)
    _stage: tuple[str, int | None] | None = None

    def add(self, progress: Progress) -> None:
        if self._stage is not None:
            progress.stage(*self._stage)
        self.all.append(progress)

    def stage(self, name: str, total: int | None = None) -> None:
        self._stage = (name, total)
        for progress in self.all:
            progress.stage(name, total)

    def update(self, done: int) -> None:
        for progress in self.all:
            progress.update(done)


@dataclass(slots=True)
class Pulls:
    """Runs pulls. A pull continues when its caller leaves, for a later call to find it further on; `close` ends all."""

    pull: Pull
    _running: dict[str, tuple[asyncio.Task[None], _Listeners]] = field(default_factory=dict)
    _closed: bool = False

    async def run(self, model_id: str, progress: Progress) -> None:
        """Wait for the model's pull, starting one if there is none.

        Raises DownloadFailed, also when the node is stopped, and Overloaded when many others are under way.
        """
        if self._closed:
            raise DownloadFailed("the node is shutting down; pull again when it is back")
        if model_id not in self._running:
            if len(self._running) >= _MOST:
                raise Overloaded(
                    f"{len(self._running)} models are being pulled, which is the bound here; pull again later",
                    retry_after=_RETRY_S,
                )
            listeners = _Listeners()
            task = asyncio.create_task(self._run(model_id, listeners), name=f"pull {model_id}")
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._running[model_id] = (task, listeners)
        task, listeners = self._running[model_id]
        listeners.add(progress)
        await asyncio.wait([task])
        if task.cancelled():
            raise DownloadFailed("the node is shutting down; pull again when it is back")
        task.result()

    async def close(self) -> None:
        """End every pull, with the processes that it started."""
        self._closed = True
        tasks = [task for task, _ in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, model_id: str, listeners: _Listeners) -> None:
        try:
            await self.pull(model_id, listeners)
        except NodeError as error:
            # Logged here, because all of its callers may have left.
            log.warning("the pull of %s failed: %s", model_id, error.message)
            raise
        finally:
            self._running.pop(model_id, None)
