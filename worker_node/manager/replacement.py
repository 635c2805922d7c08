"""One replacement of a served model: where its later form must be loaded before it serves in place of the earlier one.

These are the device that the settings have it loaded on first, and each device that the earlier form serves on. On the
others it is loaded beside the earlier form, within the memory that is free; where there is none, it is loaded later."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from worker_node.core.errors import InsufficientStorage
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import Placement
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.served import FailedModel, Names, ServedModel
from worker_node.models.store import ModelStore

_DOWN = frozenset({EngineState.BACKING_OFF, EngineState.QUARANTINED, EngineState.FAILED, EngineState.STOPPED})


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A placement that is to be ready; `earlier` is the one that serves until then, None if it is awaited anyhow."""

    placement: Placement
    earlier: Placement | None

    @property
    def needed(self) -> bool:
        """Whether the change-over depends on it: an earlier one that has left or failed serves nobody meanwhile."""
        return self.earlier is None or self.earlier.engine.ready

    @property
    def loading(self) -> bool:
        """Whether it is still to be waited for."""
        return self.needed and self.placement.state is EngineState.STARTING

    @property
    def failed(self) -> bool:
        """Whether a change-over would take away a device that serves."""
        return self.needed and self.placement.engine.status.state in _DOWN


class Replacement:
    """The placements of `new` that are to be ready before it serves in place of `old`. Attend to `new` after this."""

    def __init__(self, old: ServedModel, new: ServedModel) -> None:
        serving = {placement.device: placement for placement in old.placements if placement.engine.ready}
        self._awaited: list[_Awaited] = []
        for index, placement in enumerate(new.placements):
            if index == 0 and placement.eager:
                self._awaited.append(_Awaited(placement, None))
            elif (earlier := serving.get(placement.device)) is not None:
                placement.residency.spare = True
                self._awaited.append(_Awaited(placement, earlier))

    @property
    def failed(self) -> Placement | None:
        """The first placement that could not be loaded though the earlier form serves there."""
        return next((awaited.placement for awaited in self._awaited if awaited.failed), None)

    async def settled(self) -> None:
        """Have them loaded; wait until each is ready, or one failed, or memory does not hold it beside the old one."""
        for awaited in self._awaited:
            awaited.placement.residency.want()
        while self._undecided():
            changes = [asyncio.ensure_future(change) for awaited in self._awaited for change in _changes(awaited)]
            try:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    def finish(self) -> None:
        """The later form serves now: requests wait for what it has to load, and it is loaded as any other."""
        for awaited in self._awaited:
            placement, residency = awaited.placement, awaited.placement.residency
            residency.spare = False
            if placement.engine.ready:
                continue
            if placement.eager:
                residency.want(on_request=True)
            elif placement.engine.status.state is EngineState.UNLOADED:  # a request will have it loaded
                residency.settle()
                residency.refusal = None

    def _undecided(self) -> bool:
        first = self._awaited[0] if self._awaited else None
        if first is not None and first.earlier is None and not (first.loading or first.placement.engine.ready):
            return False  # it failed, or not both forms fit: nothing is gained by waiting for the others
        return self.failed is None and any(awaited.loading for awaited in self._awaited)


def _changes(awaited: _Awaited) -> list[Coroutine[None, None, object]]:
    """What to await for whatever changes the decision, from this call on."""
    engines = [awaited.placement.engine] + ([] if awaited.earlier is None else [awaited.earlier.engine])
    return [awaited.placement.residency.change(), *(engine.next_change() for engine in engines)]


# Takes models out of service and puts others in their place, without dropping a request.

log = logging.getLogger(__name__)

# So long after its engines have ended nobody else refers to a model any more.
_COLLECT_S = 1.0


class Turnover:
    """Retires and replaces served models. `models` are those that serve no new requests but still have engines:
    earlier forms that finish their requests, and later ones that are being loaded."""

    def __init__(self, names: Names, reconciler: Callable[[], Reconciler]) -> None:
        self._names = names
        self._reconciler_of = reconciler
        self.models: list[ServedModel] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _reconciler(self) -> Reconciler:
        return self._reconciler_of()

    async def retire(self, model: ServedModel, *, drain: bool = True) -> None:
        """Stop serving a model: new requests do not find it; its engines end after its last request, or now."""
        self._names.drop(model)
        self.models.append(model)
        if drain:
            await self._drain(model)
        else:
            await self._forget(model)

    def retire_later(self, model: ServedModel) -> None:
        """As `retire`, after the last request; returns at once."""
        self._names.drop(model)
        self._start(model)

    async def replace(self, old: ServedModel, new: ServedModel) -> str | None:
        """Serve `new` in place of `old`, which serves until `new` is ready wherever it must be (see `Replacement`), and
        until its own last request.

        Where memory holds only one of them, requests wait while `new` is loaded. Returns why `new` could not be
        loaded; then `old` serves on.
        """
        replacement = Replacement(old, new)
        self.models.append(new)
        self._reconciler.attend(new)
        try:
            await replacement.settled()
        finally:
            self.models.remove(new)
        if (failed := replacement.failed) is not None:
            reason = failed.engine.status.reason
            await self._stop(new)
            return (
                f"{new.id} could not be loaded on {failed.device} with its new settings, and serves with the earlier "
                f"ones: {reason}"
            )
        if not any(model is old for model in self._names.models):
            await self._stop(new)
            return f"{new.id} was removed while it was loaded with its new settings"
        self._swap(old, new)
        replacement.finish()
        return None

    async def close(self) -> None:
        """End the models that are being retired, with their remaining requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(model, "the node is shutting down") for model in self.models))

    def _swap(self, old: ServedModel, new: ServedModel) -> None:
        self._names.swap(old, new)
        self._reconciler.attend(new)
        self._start(old)

    def _start(self, model: ServedModel) -> None:
        # Counted as one of ours from now on, so that its engines are attended until the task begins.
        self.models.append(model)
        task = asyncio.create_task(self._drain(model), name=f"retire {model.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, model: ServedModel) -> None:
        await model.activity.idle()
        await self._forget(model)
        log.info("model %s: its engines have ended after their last request", model.id)

    async def _forget(self, model: ServedModel) -> None:
        # One of ours until its processes have ended: `close` may come before that, and their memory is not free.
        await self._stop(model)
        self.models.remove(model)
        self._reconciler.poke()

    async def _stop(self, model: ServedModel, reason: str = "the model was removed") -> None:
        self._reconciler.leave(model)
        await asyncio.gather(*(placement.engine.stop(reason) for placement in model.placements))
        # Parts of a model refer to one another. Left to the collector, which seldom looks at what is old, it keeps its
        # tokenizer for many reloads: threads, open files and 7 MB each.
        asyncio.get_running_loop().call_later(_COLLECT_S, gc.collect)


# Removes models from the store while they are served.


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
