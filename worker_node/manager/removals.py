"""Removes models from the store while they are served."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from pathlib import Path

from worker_node.core.errors import InsufficientStorage
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.manager.turnover import Turnover
from worker_node.models.store import ModelStore


class WhileInUse(StrEnum):
    """How to remove a model that has requests: refuse, wait until they end, or end them."""

    REFUSE = "refuse"
    DRAIN = "drain"
    FORCE = "force"


class Removals:
    """The removals under way. A directory is `in` it until its files are gone; `count` includes those that ended.

    Models of the settings are among the `failed` ones from then on.
    """

    def __init__(self, store: ModelStore, turnover: Turnover, failed: list[FailedModel]) -> None:
        self._store = store
        self._turnover = turnover
        self._failed = failed
        self._leaving: set[Path] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.count = 0

    def __contains__(self, directory: Path) -> bool:
        return directory in self._leaving

    async def run(self, directory: Path, models: list[ServedModel], *, drain: bool) -> None:
        """Retire the `models` of a directory and remove it. Once begun it continues when the caller leaves.

        Raises InsufficientStorage, and keeps serving the models, where the directory cannot be written.
        """
        # Before anything is retired: a file system that is read-only, or another user's.
        if not all(os.access(written, os.W_OK) for written in (directory, directory.parent)):
            raise InsufficientStorage(
                f"model {directory.name} cannot be removed: {directory} cannot be written by this node's user, or its "
                "file system is read-only",
                param="model",
            )
        task = asyncio.create_task(self._remove(directory, models, drain=drain))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _remove(self, directory: Path, models: list[ServedModel], *, drain: bool) -> None:
        self._leaving.add(directory)
        self.count += 1
        try:
            await asyncio.gather(*(self._turnover.retire(model, drain=drain) for model in models))
            await asyncio.to_thread(self._store.remove, directory.name)
            text = f"it was deleted; to serve it, install it again: npu-node pull {directory.name}"
            self._failed += [model.without_files(text) for model in models if model.without_files is not None]
        finally:
            self._leaving.discard(directory)
