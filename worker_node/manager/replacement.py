"""Takes models out of service, puts others in their place, and removes their files, without dropping a request."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from worker_node.core.errors import InsufficientStorage
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import first_change
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.served import Names, ServedModel
from worker_node.manager.work import BackgroundTasks
from worker_node.models.store import ModelStore

log = logging.getLogger(__name__)

# So long after its engines have ended nobody else refers to a model any more.
_COLLECT_S = 1.0


class WhileInUse(StrEnum):
    """How to remove a model that has requests: refuse, wait until they end, or end them."""

    REFUSE = "refuse"
    DRAIN = "drain"
    FORCE = "force"


class Replacement:
    """Retires, replaces and removes served models. What has begun continues when its caller leaves, until `close`.

    The directories in `removing` have files that are being removed; `removals` counts them and those that ended.
    """

    def __init__(self, names: Names, reconciler: Reconciler, store: ModelStore) -> None:
        self.removing: set[Path] = set()
        self.removals = 0
        self._names = names
        self._reconciler = reconciler
        self._store = store
        self._tasks = BackgroundTasks()

    async def replace(self, old: ServedModel, new: ServedModel) -> str | None:
        """Serve `new` in place of `old`, which serves until its last request. Returns why `new` could not be loaded.

        The first engine of `new` is loaded before the change if memory holds both, and if it is eager or `old` serves
        on its device. The others are loaded after it where they are eager or `old` served; requests for them wait.
        """
        first = new.placements[0]
        served = {placement.device for placement in old.placements if placement.engine.ready}
        self._reconciler.unserved.append(new)
        self._reconciler.manage(new)
        try:
            if first.device in served:
                first.request_load()
            while first.state is EngineState.STARTING:
                await first_change([first])
        finally:
            self._reconciler.unserved.remove(new)
        # A load that was refused may fit when `old` has left.
        refusal = None if first.refusal is None else self._reconciler.never_fits(new, first, without=old)
        if first.state.down or refusal is not None:
            problem = (
                f"{new.id} could not be loaded on {first.device} with its new settings, and serves with the earlier "
                f"ones: {refusal or first.reason}"
            )
            await self._stop(new)
            return problem
        if not any(model is old for model in self._names.models):
            await self._stop(new)
            return f"{new.id} was removed while it was loaded with its new settings"
        self._names.serve(new if model is old else model for model in self._names.models)
        self._reconciler.manage(new)
        self.retire(old)
        for placement in new.placements:
            if placement.state is EngineState.UNLOADED and (placement.eager or placement.device in served):
                placement.request_load(on_request=True)
        return None

    def retire(self, model: ServedModel, *, drain: bool = True) -> asyncio.Task[None]:
        """Stop serving a model at once; the returned task ends its engines, after the last request if `drain`."""
        self._names.serve(other for other in self._names.models if other is not model)
        # Managed on from now, not only when the task begins.
        self._reconciler.unserved.append(model)
        return self._tasks.start(self._end(model, drain=drain), f"retire {model.id}")

    async def remove(self, directory: Path, models: list[ServedModel], *, drain: bool) -> None:
        """Retire the models of a directory and remove it; raises InsufficientStorage where it cannot be written."""
        # Before anything is retired: a file system that is read-only, or another user's.
        if not all(os.access(written, os.W_OK) for written in (directory, directory.parent)):
            raise InsufficientStorage(
                f"model {directory.name} cannot be removed: {directory} cannot be written by this node's user, or its "
                "file system is read-only",
                param="model",
            )
        await asyncio.shield(
            self._tasks.start(self._remove(directory, models, drain=drain), f"remove {directory.name}")
        )

    async def close(self) -> None:
        await self._tasks.close()
        unserved = self._reconciler.unserved
        await asyncio.gather(*(self._stop(model, "the node is shutting down") for model in unserved))

    async def _remove(self, directory: Path, models: list[ServedModel], *, drain: bool) -> None:
        self.removing.add(directory)
        self.removals += 1
        try:
            await asyncio.gather(*(self.retire(model, drain=drain) for model in models))
            await asyncio.to_thread(self._store.remove, directory.name)
            reason = f"it was deleted; to serve it, install it again: npu-node pull {directory.name}"
            failed = [model.if_failed for model in models if model.if_failed is not None]
            self._names.failed += [replace(model, reason=reason) for model in failed]
        finally:
            self.removing.discard(directory)

    async def _end(self, model: ServedModel, *, drain: bool) -> None:
        if drain:
            await model.activity.idle.wait()
        # Managed until its processes have ended: `close` may come before that, and their memory is not free.
        await self._stop(model)
        self._reconciler.unserved.remove(model)
        self._reconciler.poke()
        log.info("model %s: its engines have ended", model.id)

    async def _stop(self, model: ServedModel, reason: str = "the model was removed") -> None:
        self._reconciler.release(model)
        await asyncio.gather(*(placement.engine.stop(reason) for placement in model.placements))
        # Parts of a model refer to one another. Left to the collector, which seldom looks at what is old, it keeps its
        # tokenizer for many reloads: threads, open files and 7 MB each.
        asyncio.get_running_loop().call_later(_COLLECT_S, gc.collect)
