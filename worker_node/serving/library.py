"""The models that can be asked for by name: those that are served, and those that are only installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker_node.errors import ModelNotFound
from worker_node.models.manifest import InstalledModel
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore
from worker_node.serving.registry import Registry, ServedModel
from worker_node.serving.residence import Residence


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

    async def find(self, name: str) -> ServedModel:
        """The model of that name, served from now on if it was not. Raises ModelNotFound, ConfigurationError."""
        try:
            return self.registry.find(name)
        except ModelNotFound:
            installed = await asyncio.to_thread(self.store.get, name)
        async with self._adding:
            known = {model.id: model for model in self.registry.models}
            if installed.id not in known:
                known[installed.id] = await asyncio.to_thread(self._build, installed)
                self.registry.add(known[installed.id])
        return known[installed.id]

    async def installed(self) -> list[InstalledModel]:
        """Every model that can be asked for."""
        served = [model.installed for model in self.registry.models]
        known = {model.id for model in served}
        return served + [model for model in await asyncio.to_thread(self.store.installed) if model.id not in known]

    async def pull(self, name: str, progress: Progress) -> InstalledModel:
        """Install a model of the catalog. Raises ModelNotFound, ModelError."""
        return await asyncio.to_thread(self.store.pull, name, progress)

    async def delete(self, name: str) -> None:
        """Stop serving a model and remove its files. Raises ModelNotFound."""
        installed = await asyncio.to_thread(self.store.get, name)
        for model in self.registry.models:
            if model.id == installed.id:
                self.residence.keep(model, None)
                self.registry.drop(model)
                for placement in model.placements:
                    await placement.engine.stop()
        await asyncio.to_thread(self.store.remove, installed.id)
