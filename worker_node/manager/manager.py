"""`ModelManager`: the only component that loads, unloads, adds, pulls and removes models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from worker_node.core.errors import (
    BadRequest,
    ConfigurationError,
    DownloadFailed,
    ModelError,
    ModelInUse,
    ModelNotFound,
    NodeError,
    Overloaded,
)
from worker_node.core.types import Progress
from worker_node.devices.memory import resident_memory
from worker_node.manager.on_demand import Build, OnDemand
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.replacement import Replacement, WhileInUse
from worker_node.manager.served import FailedModel, KeepAlive, Names, ServedModel
from worker_node.models.directory import InstalledModel
from worker_node.models.pull import PullSpec, pull
from worker_node.models.store import ModelStore
from worker_node.registry import tasks

R = TypeVar("R")

_UNLIMITED: Mapping[str, int | None] = {}
# Each is a process that downloads and converts.
_MOST_PULLS = 8
_PULL_RETRY_S = 30.0

log = logging.getLogger(__name__)

Pull = Callable[[str, Progress], Coroutine[None, None, None]]


class ModelManager:
    """Serves the configured `models`, and models of the `store` from when they are first asked for.

    `build` makes a served model of an installed one; nothing of it is loaded yet. `budgets` are bytes by memory pool,
    None for no limit. Models are loaded and unloaded from `start` on.
    """

    def __init__(
        self,
        models: Iterable[ServedModel | FailedModel],
        store: ModelStore,
        build: Build,
        budgets: Mapping[str, int | None] = _UNLIMITED,
        *,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[int], int | None] = resident_memory,
    ) -> None:
        self.store = store
        self.names = Names(store.catalog, models)
        self._reconciler = Reconciler(self.names, budgets, clock=clock, measure=measure)
        self.replacement = Replacement(self.names, self._reconciler, store)
        self._on_demand = OnDemand(self.names, store, build, self.replacement, self._reconciler, clock)
        self._clock = clock
        self._renewing: asyncio.Task[None] | None = None
        self._pulls = Pulls(partial(pull, store.root))

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The served models, loaded or not."""
        return self.names.models

    @property
    def failed(self) -> Sequence[FailedModel]:
        """The models of the settings that cannot be served, as it is."""
        return self.names.failed

    @property
    def budgets(self) -> dict[str, int | None]:
        """Bytes that models may take, by memory pool; None for no limit."""
        return self._reconciler.budgets

    def set_budget(self, pool: str, size: int | None) -> None:
        """Change the budget: idle models are unloaded if it is exceeded."""
        self._reconciler.budgets[pool] = size
        self._reconciler.poke()

    async def default(self, kind: str, deadline: float) -> ServedModel:
        """The first model of that kind, for requests that name none. Raises as `resolve`, too, if it has failed."""
        try:
            return self.names.default(kind)
        except ModelNotFound:
            failed = next((model for model in self.failed if model.kind == kind), None)
            if failed is None:
                raise
            return await self.resolve(failed.name, deadline)

    def add(self, model: ServedModel) -> None:
        """Serve one more model."""
        self._reconciler.add(model)

    async def resolve(self, name: str, deadline: float) -> ServedModel:
        """The model of that name; a model that is installed but not served yet is served from now on.

        `deadline` is monotonic seconds. Raises ModelNotFound, also when it is installed but damaged; EngineUnavailable
        for a configured one that failed; DeadlineExceeded and Overloaded where its files must be read first.
        """
        try:
            return self.names.find(name)
        except ModelNotFound:
            return await self._on_demand.find(name, deadline)

    async def installed(self, deadline: float) -> list[InstalledModel]:
        """Every model that requests can name, without those whose task is no longer installed.

        Raises as `in_store`.
        """
        others = await self.in_store(deadline)
        served = [model.installed for model in self.models]
        known = {model.id for model in served}
        return served + [model for model in others if model.id not in known and model.kind in tasks()]

    async def in_store(self, deadline: float) -> list[InstalledModel]:
        """Every undamaged model of the store. Raises DeadlineExceeded, Overloaded."""
        return await self.query_store(_installed, deadline)

    async def query_store(self, query: Callable[[ModelStore], R], deadline: float) -> R:
        """Run a query of the store in a thread. Raises DeadlineExceeded, Overloaded."""
        reading = self._on_demand.reading

        async def run() -> R:
            return await reading.in_thread(query, self.store)

        return await reading.result(reading.start(run()), deadline)

    async def load(self, model: ServedModel, deadline: float) -> float:
        """Load the model; return the seconds that it took. Raises DeadlineExceeded, InsufficientMemory.

        For a model whose engines cannot be loaded now it returns, and routing gives the reason.
        """
        began = self._clock()
        if not self.request_load(model):
            return 0.0
        with model.activity.working():
            await model.placements[0].settled(deadline)
        return self._clock() - began

    def request_load(self, model: ServedModel) -> bool:
        """Start to load the model's preferred engine; False if one serves already, or none can be loaded now."""
        preferred = model.placements[0]
        if model.serving() is not None or not preferred.state.loadable:
            return False
        preferred.wake(insist=True)
        return True

    async def force_load(self, model: ServedModel) -> None:
        """Start to load the model's preferred engine, even one that failed or backs off and would be retried later."""
        engine = model.placements[0].engine
        if engine.status.state.down:
            await engine.unload()
        self.request_load(model)

    async def decided(self) -> None:
        """Wait until the manager has acted on what is wanted now."""
        await self._reconciler.decided()

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Unload the model when it has been idle for `seconds`; None keeps it for good."""
        model.activity.kept = KeepAlive(seconds, self._clock())
        for placement in model.placements:
            placement.unload_when_idle = False
        self._reconciler.poke()

    def expires_in(self, model: ServedModel) -> float | None:
        """Seconds until the model is unloaded if it stays idle, counted from its last use; None if it stays loaded."""
        until = model.unloads_at()
        return model.keep_s if until is None else max(0.0, until - self._clock())

    def unload(self, model: ServedModel) -> None:
        """Unload the model as soon as it is idle."""
        model.activity.kept = None
        for placement in model.placements:
            placement.unload_when_idle = True
        self._reconciler.poke()

    def fail(self, model: ServedModel, failed: FailedModel) -> None:
        """Serve the model no longer after its last request: `failed` says why, and what to do."""
        self.names.failed.append(failed)
        self.replacement.retire_later(model)

    async def pull(self, name: str, progress: Progress) -> None:
        """Install the model that `name` stands for. Raises as `pull_spec`, and what the pull ends with."""
        spec = await self.pull_spec(name, math.inf)
        if spec.model_id in {model.id for model in self.models}:
            return
        try:
            installed = await self.query_store(lambda store: store.find(spec) is not None, math.inf)
        except (OSError, ConfigurationError) as error:
            # What is there is damaged, or may no longer be looked into: no mistake of the settings, nor a bug.
            raise ModelError(f"{spec.model_id} cannot be looked up in the store: {error}") from error
        if not installed:
            await self._pulls.run(spec.name, progress)
            self._on_demand.retry_soon()
            for failed in [model for model in self.failed if model.answers_to(spec.model_id)]:
                with contextlib.suppress(NodeError):
                    await self.resolve(failed.name, math.inf)

    async def pull_spec(self, name: str, deadline: float) -> PullSpec:
        """What a request to pull `name` asks for. Raises as `ModelStore.pull_spec` and `query_store`."""
        return await self.query_store(lambda store: store.pull_spec(name), deadline)

    async def delete(self, name: str, in_use: WhileInUse = WhileInUse.DRAIN, *, deadline: float = math.inf) -> None:
        """Stop serving a model and remove its files, damaged or not. Raises ModelNotFound, ModelInUse, BadRequest.

        Finding it may take until the `deadline`. A removal that has started continues when the caller leaves.
        """
        try:
            directory = await self.query_store(lambda store: store.locate(name), deadline)
        except ModelNotFound:
            model = self.names.find(name)
            raise BadRequest(
                f"model {model.id} is served from {model.installed.path}, outside of the store; take it out of "
                "node.toml and reload",
                param="model",
            ) from None
        models = [model for model in self.models if model.installed.path == directory]
        if in_use is WhileInUse.REFUSE and any(model.activity.idle_since is None for model in models):
            raise ModelInUse(f"model {directory.name} has requests in flight; add ?force=true to end them")
        await self.replacement.remove(directory, models, drain=in_use is not WhileInUse.FORCE)

    def start(self) -> None:
        """Load the models that are to be loaded at start-up, and others from now on: returns at once."""
        self._reconciler.start()
        self._renewing = asyncio.create_task(self._renew_stale(), name="renew models")

    async def _renew_stale(self) -> None:
        """Read models again whose files have changed: what is known of them, as their spaces and passports, is past."""
        while True:
            model = await self._reconciler.stale.get()
            # A profile's own choice is made again by a restart alone.
            renewable = model.without_files is not None or not self.names.configured(model)
            if not renewable or not any(known is model for known in self.models):
                continue
            log.warning("model %s: its files have changed; it is read again", model.id)
            if model.without_files is None:
                self.replacement.retire_later(model)
            else:
                self.fail(model, model.without_files("its files have changed, and could not be read again"))
            self._on_demand.retry_soon()
            with contextlib.suppress(NodeError):
                await self.resolve(model.id, math.inf)

    async def close(self) -> None:
        """End pulls; the models are served until `stop`."""
        await self._pulls.close()

    async def stop(self) -> None:
        """End all engines."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._on_demand.reading.close()
        await self.replacement.close()
        await self._reconciler.close()
        await asyncio.gather(*(place.engine.stop() for model in self.models for place in model.placements))


def _installed(store: ModelStore) -> list[InstalledModel]:
    return store.installed()


@dataclass(slots=True)
class Pulls:
    """Runs pulls, each of which continues when its caller leaves; `close` ends all.

    The store's lock has a second pull of a model wait for the first.
    """

    pull: Pull
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _closed: bool = False

    async def run(self, name: str, progress: Progress) -> None:
        """Pull. Raises DownloadFailed, also when the node is stopped, and Overloaded when many are under way."""
        if self._closed:
            raise DownloadFailed("the node is shutting down; pull again when it is back")
        if len(self._running) >= _MOST_PULLS:
            raise Overloaded(
                f"{len(self._running)} models are being pulled, which is the bound here; pull again later",
                retry_after=_PULL_RETRY_S,
            )
        task = asyncio.create_task(self.pull(name, progress), name=f"pull {name}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.wait([task])
        if task.cancelled():
            raise DownloadFailed("the node is shutting down; pull again when it is back")
        try:
            task.result()
        except NodeError as error:
            # Its caller may answer nobody any more.
            log.warning("the pull of %s failed: %s", name, error.message)
            raise

    async def close(self) -> None:
        """End every pull, with the processes that it started."""
        self._closed = True
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
