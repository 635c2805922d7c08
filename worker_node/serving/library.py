"""The models that can be asked for by name: those that are served, and those that are only installed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from worker_node.errors import ModelNotFound
from worker_node.models.manifest import InstalledModel
from worker_node.models.progress import Progress
from worker_node.models.pulling import pull
from worker_node.models.store import ModelStore
from worker_node.serving.pulls import Pulls
from worker_node.serving.registry import Registry, ServedModel
from worker_node.serving.residence import Residence

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


class Library:
    """Serves installed models when they are first asked for. `build` makes a served model, nothing of it loaded."""

    def __init__(
        self,
        registry: Registry,
        store: ModelStore,
        residence: Residence,
        build: Callable[[InstalledModel], ServedModel],
    ) -> None:
        self.registry = registry
        self.store = store
        self.residence = residence
        self._build = build
        self._adding = asyncio.Lock()
        self._pulls = Pulls(partial(pull, store.root))

    async def find(self, name: str) -> ServedModel:
        """The model of that name, served from now on if it was not.

        Raises ModelNotFound, also when it is installed but damaged.
        """
        try:
            return self.registry.find(name)
        except ModelNotFound:
            installed = await self._usable(name, self.store.get, name)
        async with self._adding:
            known = {model.id: model for model in self.registry.models}
            if installed.id not in known:
                known[installed.id] = await self._usable(name, self._build, installed)
                self.registry.add(known[installed.id])
        return known[installed.id]

    async def _usable(self, name: str, read: Callable[[A], R], argument: A) -> R:
        """What `read` makes of a model's files. Whatever is wrong with them is no fault of the request's."""
        try:
            return await asyncio.to_thread(read, argument)
        except ModelNotFound:
            raise
        except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
            log.warning("model %s cannot be served: %s: %s", name[:100], type(error).__name__, error)
            raise ModelNotFound(
                f"model {name[:100]!r} is installed here but damaged (the node's log says how); delete it and pull it "
                "again",
                param="model",
            ) from error

    async def installed(self) -> list[InstalledModel]:
        """Every model that can be asked for."""
        served = [model.installed for model in self.registry.models]
        known = {model.id for model in served}
        return served + [model for model in await asyncio.to_thread(self.store.installed) if model.id not in known]

    async def pull(self, name: str, progress: Progress) -> None:
        """Install a model of the catalog. Raises ModelNotFound, DownloadFailed."""
        entry = self.store.catalog.resolve(name)
        if entry.id not in {model.id for model in await self.installed()}:
            await self._pulls.run(entry.id, progress)

    async def delete(self, name: str) -> None:
        """Stop serving a model and remove its files, damaged or not. Raises ModelNotFound."""
        directory = await asyncio.to_thread(self.store.locate, name)
        for model in self.registry.models:
            if model.installed.path == directory:
                self.residence.keep(model, None)
                self.registry.drop(model)
                for placement in model.placements:
                    await placement.engine.stop()
        await asyncio.to_thread(self.store.remove, directory.name)

    async def close(self) -> None:
        """End what goes on in the background: pulls, and plans to unload."""
        await self._pulls.close()
        await self.residence.close()
