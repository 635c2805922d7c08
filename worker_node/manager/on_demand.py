"""Starts to serve installed models on their first request, and failed ones once they are repaired.

Their files are read within the deadline of the request (`reading.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from worker_node.core.errors import EngineUnavailable, ModelNotFound, NodeError
from worker_node.manager.names import Names
from worker_node.manager.reading import FileReading, InThread
from worker_node.manager.removals import Removals
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.models.manifest import InstalledModel
from worker_node.models.store import ModelStore

log = logging.getLogger(__name__)

R = TypeVar("R")

Build = Callable[[InstalledModel], ServedModel]

_RETRY_S = 10.0


class OnDemand:
    """Builds models by name with `build` and has each served with `add`.

    `failed` are the configured ones that failed. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        names: Names,
        store: ModelStore,
        build: Build,
        removals: Removals,
        add: Callable[[ServedModel], None],
        failed: list[FailedModel],
        clock: Callable[[], float],
    ) -> None:
        self.failed = failed
        self.reading = FileReading(clock=clock)
        self._names = names
        self._store = store
        self._build = build
        self._removals = removals
        self._add = add
        self._clock = clock
        self._tried: dict[str, float] = {}
        self._building: dict[str, asyncio.Lock] = {}

    async def find(self, name: str, deadline: float) -> ServedModel:
        """The model of that name, which is not served yet; it is served from now on.

        Raises ModelNotFound, also when it is installed but damaged; EngineUnavailable for a configured one that failed;
        DeadlineExceeded; Overloaded when too many look-ups are under way.
        """
        return await self.reading.run(normalise_name(name), lambda in_thread: self._find(name, in_thread), deadline)

    def retry_soon(self) -> None:
        """Files have changed: the next request tries to build a failed model again."""
        self._tried.clear()

    async def _find(self, name: str, in_thread: InThread) -> ServedModel:
        while True:
            if (failed := next((f for f in self.failed if f.answers_to(name)), None)) is not None:
                return await self._repaired(failed, in_thread)
            removals = self._removals.count
            served = [model.id for model in self._names.models]
            installed = await self._usable(name, in_thread(self._store.get, name, served))
            async with self._lock(installed.id):
                if (known := self._known(installed.id)) is not None:
                    return known
                if installed.path in self._removals:
                    raise ModelNotFound(f"model {name[:100]!r} is being removed", param="model")
                model = await self._usable(name, in_thread(self._build, installed))
                # A reload may have added it meanwhile.
                if (known := self._known(installed.id)) is not None:
                    return known
                if removals == self._removals.count:
                    self._add(model)
                    return model
            # Files were removed meanwhile: perhaps those of this model.

    async def _repaired(self, failed: FailedModel, in_thread: InThread) -> ServedModel:
        """A configured model that failed, if its files have been repaired."""
        async with self._lock(failed.name):
            if failed not in self.failed:
                return self._names.find(failed.name)
            reason = failed.reason
            if self._clock() >= self._tried.get(failed.name, -math.inf) + _RETRY_S:
                self._tried[failed.name] = self._clock()
                try:
                    model = await in_thread(failed.build)
                except Exception as error:  # noqa: BLE001  (whatever is wrong with the files)
                    reason = error.message if isinstance(error, NodeError) else f"{type(error).__name__}: {error}"
                else:
                    if failed not in self.failed:  # a reload has changed it meanwhile
                        return self._names.find(failed.name)
                    self.failed.remove(failed)
                    self._add(model)
                    return model
        raise EngineUnavailable(f"model {failed.name} cannot be served: {reason}", retry_after=_RETRY_S)

    def _known(self, model_id: str) -> ServedModel | None:
        return next((model for model in self._names.models if model.id == model_id), None)

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock for building that model, so that it is not built twice at once."""
        return self._building.setdefault(normalise_name(name), asyncio.Lock())

    @staticmethod
    async def _usable(name: str, read: Awaitable[R]) -> R:
        """What is read of a model's files. Damage to them is never the fault of the request."""
        try:
            return await read
        except ModelNotFound:
            raise
        except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
            log.warning("model %s cannot be served: %s: %s", name[:100], type(error).__name__, error)
            raise ModelNotFound(
                f"model {name[:100]!r} is installed here but damaged (the node's log says how); delete it and pull it "
                "again",
                param="model",
            ) from error
