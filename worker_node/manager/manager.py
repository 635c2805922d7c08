"""`ModelManager`: the only component that loads, unloads, adds and removes models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from worker_node.domain import ModelKind
from worker_node.errors import ModelNotFound
from worker_node.hosting.supervisor import SupervisedEngine
from worker_node.manager.names import Names
from worker_node.manager.pulls import Pulls
from worker_node.manager.residence import Residence
from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel
from worker_node.models.progress import Progress
from worker_node.models.pulling import pull, requested
from worker_node.models.store import ModelStore

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

Build = Callable[[InstalledModel], ServedModel]


class ModelManager:
    """Serves the configured `models`, and models of the `store` from when they are first asked for.

    `build` makes a served model of an installed one; nothing of it is loaded yet.
    """

    def __init__(
        self, models: Iterable[ServedModel], store: ModelStore, build: Build, residence: Residence | None = None
    ) -> None:
        self.store = store
        self._names = Names(store.catalog, models)
        self._residence = residence or Residence()
        self._build = build
        self._adding = asyncio.Lock()
        self._pulls = Pulls(partial(pull, store.root))

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The served models, loaded or not."""
        return self._names.models

    def find(self, name: str) -> ServedModel:
        """See `Names.find`."""
        return self._names.find(name)

    def default(self, kind: ModelKind) -> ServedModel:
        """See `Names.default`."""
        return self._names.default(kind)

    def aliases(self, model: ServedModel) -> list[str]:
        """See `Names.aliases`."""
        return self._names.aliases(model)

    def add(self, model: ServedModel) -> None:
        """See `Names.add`."""
        self._names.add(model)

    def drop(self, model: ServedModel) -> None:
        """See `Names.drop`."""
        self._names.drop(model)

    async def resolve(self, name: str) -> ServedModel:
        """The model of that name; one that is only installed is served from now on.

        Raises ModelNotFound, also when it is installed but damaged.
        """
        try:
            return self._names.find(name)
        except ModelNotFound:
            installed = await self._usable(name, self.store.get, name)
        async with self._adding:
            known = {model.id: model for model in self.models}
            if installed.id not in known:
                known[installed.id] = await self._usable(name, self._build, installed)
                self._names.add(known[installed.id])
        return known[installed.id]

    async def _usable(self, name: str, read: Callable[[A], R], argument: A) -> R:
        """What `read` makes of a model's files. Damage to them is never the fault of the request."""
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
        served = [model.installed for model in self.models]
        known = {model.id for model in served}
        return served + [model for model in await asyncio.to_thread(self.store.installed) if model.id not in known]

    async def load(self, model: ServedModel, deadline: float) -> float:
        """See `Residence.load`."""
        return await self._residence.load(model, deadline)

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """See `Residence.keep`."""
        self._residence.keep(model, seconds)

    def expires_in(self, model: ServedModel) -> float | None:
        """See `Residence.expires_in`."""
        return self._residence.expires_in(model)

    async def unload(self, model: ServedModel) -> None:
        """See `Residence.unload`."""
        await self._residence.unload(model)

    async def pull(self, name: str, progress: Progress) -> None:
        """Install the model that `name` stands for. Raises as `requested`, and what the pull ends with."""
        wish = requested(self.store, name)
        if wish.model_id in {model.id for model in self.models}:
            return
        if not await asyncio.to_thread(self.store.is_installed, wish):
            await self._pulls.run(wish.spelling, progress)

    async def delete(self, name: str) -> None:
        """Stop serving a model and remove its files, damaged or not. Raises ModelNotFound."""
        directory = await asyncio.to_thread(self.store.locate, name)
        for model in self.models:
            if model.installed.path == directory:
                self._residence.keep(model, None)
                self._names.drop(model)
                for placement in model.placements:
                    await placement.engine.stop()
        await asyncio.to_thread(self.store.remove, directory.name)

    def start(self) -> None:
        """Load the models that are to be loaded at start-up: returns at once."""
        for engine in self._engines():
            engine.start()

    async def close(self) -> None:
        """End pulls and plans to unload; the models are served until `stop`."""
        await self._pulls.close()
        await self._residence.close()

    async def stop(self) -> None:
        """End all engines."""
        await asyncio.gather(*(engine.stop() for engine in self._engines()))

    def _engines(self) -> list[SupervisedEngine]:
        engines = [placement.engine for model in self.models for placement in model.placements]
        return [engine for engine in engines if isinstance(engine, SupervisedEngine)]
