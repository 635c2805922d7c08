"""`ModelManager`: the only component that loads, unloads, adds, pulls and removes models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from worker_node.core.errors import (
    BadRequest,
    ConfigurationError,
    DownloadFailed,
    EngineUnavailable,
    ModelError,
    ModelInUse,
    ModelNotFound,
    NodeError,
)
from worker_node.devices.memory import resident_memory
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.replacement import Replacement, WhileInUse
from worker_node.manager.served import FailedModel, KeepAlive, Names, ServedModel
from worker_node.manager.work import BoundedWork
from worker_node.models.catalog import normalise_name
from worker_node.models.directory import InstalledModel
from worker_node.models.progress import Progress
from worker_node.models.pull import pull
from worker_node.models.store import ModelStore
from worker_node.registry import task_of, tasks

R = TypeVar("R")
M = TypeVar("M", bound=ServedModel)

_UNLIMITED: Mapping[str, int | None] = {}
# Each is a process that downloads and converts.
_MOST_PULLS = 8
_PULL_RETRY_S = 30.0
# A disk may be slow, or never respond (a network file system): threads that other work needs stay free.
_READING_THREADS = 4
_MOST_READINGS = 32
_READING_RETRY_S = 5.0
# Between two attempts to build a failed model.
_REBUILD_S = 10.0

log = logging.getLogger(__name__)


class ModelManager:
    """Serves the configured `models`, and models of the `store` from when they are first asked for.

    `build` makes a served model of an installed one; nothing of it is loaded yet. `look_again` looks at the devices
    again, before a model that has changed is built again. `budgets` are bytes by memory pool, None for no limit.
    Models are loaded and unloaded from `start` on. Deadlines are monotonic seconds of `clock`.
    """

    def __init__(
        self,
        models: Iterable[ServedModel | FailedModel],
        store: ModelStore,
        build: Callable[[InstalledModel], ServedModel],
        budgets: Mapping[str, int | None] = _UNLIMITED,
        *,
        look_again: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[int], int | None] = resident_memory,
    ) -> None:
        self.store = store
        self.names = Names(store.catalog, models)
        self._build = build
        self._look_again = look_again
        self._clock = clock
        self._reconciler = Reconciler(self.names, budgets, clock=clock, measure=measure)
        self.replacement = Replacement(self.names, self._reconciler, store)
        self._renewing: asyncio.Task[None] | None = None
        self._pulls = BoundedWork(
            _MOST_PULLS,
            f"{_MOST_PULLS} models are being pulled, which is the bound here; pull again later",
            _PULL_RETRY_S,
            lambda: DownloadFailed("the node is shutting down; pull again when it is back"),
        )
        self._readings = BoundedWork(
            _MOST_READINGS,
            f"the files of models are being read for {_MOST_READINGS} other requests, which is the bound; the disk of "
            "this node is slow",
            _READING_RETRY_S,
            lambda: EngineUnavailable("the node is shutting down; use another node"),
            late="the deadline passed while the files of models were read; the disk is slow, or many models are asked "
            "for at once",
            clock=clock,
        )
        self._threads = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="read-models")
        # Look-ups under way by name, which later callers share; locks, so that no model is built twice at once.
        self._lookups: dict[str, asyncio.Task[ServedModel]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rebuilt_at: dict[str, float] = {}

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return self.names.models

    @property
    def failed(self) -> list[FailedModel]:
        return self.names.failed

    # Finding models

    async def default(self, kind: str, deadline: float) -> ServedModel:
        """The first model of that kind, for requests that name none. Raises as `resolve`, too, if it has failed."""
        try:
            return self.names.default(kind)
        except ModelNotFound:
            failed = next((model for model in self.failed if model.kind == kind), None)
            if failed is None:
                raise
            return await self.resolve(failed.name, deadline)

    async def resolve(self, name: str, deadline: float) -> ServedModel:
        """The model of that name; a model that is installed but not served yet is served from now on.

        Raises ModelNotFound, also when it is installed but damaged; EngineUnavailable for a configured one that failed;
        DeadlineExceeded and Overloaded where its files must be read first.
        """
        with contextlib.suppress(ModelNotFound):
            return self.names.find(name)
        key = normalise_name(name)
        if key not in self._lookups:
            lookup = self._lookups[key] = self._readings.start(self._look_up(name), f"look up {key}")
            lookup.add_done_callback(lambda ended: self._lookups.get(key) is ended and self._lookups.pop(key))
        return await self._readings.result(self._lookups[key], deadline)

    async def model_of(self, kind: str, form: type[M], name: str | None, deadline: float) -> M:
        """The model of that name, or the default of that kind. Raises BadRequest for another kind, and as `resolve`."""
        model = await (self.default(kind, deadline) if name is None else self.resolve(name, deadline))
        if isinstance(model, form):
            return model
        suitable = ", ".join(other.id for other in self.models if other.installed.kind == kind)
        instead = (
            f"use one of these: {suitable}" if suitable else f"this node has no {kind} model: npu-node pull adds one"
        )
        raise BadRequest(
            f"model {model.id} is for {task_of(model.installed.kind).verb}, not for {task_of(kind).verb}; {instead}",
            param="model",
        )

    async def installed(self, deadline: float) -> list[InstalledModel]:
        """Every model that requests can name, without those whose task is gone. Raises as `query_store`."""
        others = await self.query_store(ModelStore.installed, deadline)
        served = [model.installed for model in self.models]
        known = {model.id for model in served}
        return served + [model for model in others if model.id not in known and model.kind in tasks()]

    async def query_store(self, query: Callable[[ModelStore], R], deadline: float) -> R:
        """Run a query of the store in a thread. Raises DeadlineExceeded, Overloaded."""
        reading = self._readings.start(self._in_thread(query, self.store), "query the store")
        return await self._readings.result(reading, deadline)

    async def _in_thread(self, call: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def _look_up(self, name: str) -> ServedModel:
        while True:
            if (failed := next((f for f in self.failed if f.answers_to(name)), None)) is not None:
                return await self._rebuilt(failed)
            removals = self.replacement.removals
            served = [model.id for model in self.models]
            installed = await _usable(name, self._in_thread(self.store.get, name, served))
            async with self._locks[normalise_name(installed.id)]:
                if (known := self._known(installed.id)) is not None:
                    return known
                if installed.path in self.replacement.removing:
                    raise ModelNotFound(f"model {name[:100]!r} is being removed", param="model")
                model = await _usable(name, self._in_thread(self._build, installed))
                # A reload may have added it meanwhile.
                if (known := self._known(installed.id)) is not None:
                    return known
                if removals == self.replacement.removals:
                    self.add(model)
                    return model
            # Files were removed meanwhile: perhaps those of this model.

    async def _rebuilt(self, failed: FailedModel) -> ServedModel:
        async with self._locks[normalise_name(failed.name)]:
            if failed not in self.failed:
                return self.names.find(failed.name)
            reason = failed.reason
            if self._clock() >= self._rebuilt_at.get(failed.name, -math.inf) + _REBUILD_S:
                self._rebuilt_at[failed.name] = self._clock()
                try:
                    model = await self._in_thread(failed.build)
                except Exception as error:  # noqa: BLE001  (whatever is wrong with the files)
                    reason = error.message if isinstance(error, NodeError) else f"{type(error).__name__}: {error}"
                else:
                    if failed not in self.failed:  # a reload has changed it meanwhile
                        return self.names.find(failed.name)
                    self.failed.remove(failed)
                    self.add(model)
                    return model
        raise EngineUnavailable(f"model {failed.name} cannot be served: {reason}", retry_after=_REBUILD_S)

    def _known(self, model_id: str) -> ServedModel | None:
        return next((model for model in self.models if model.id == model_id), None)

    # Loading and unloading

    async def load(self, model: ServedModel, deadline: float) -> float:
        """Load the model; return the seconds that it took. Raises DeadlineExceeded, InsufficientMemory."""
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
        preferred.request_load(on_request=True)
        return True

    async def force_load(self, model: ServedModel) -> None:
        """As `request_load`, also for an engine that failed or backs off and would be retried later."""
        preferred = model.placements[0]
        if preferred.state.down:
            await preferred.engine.unload()
        self.request_load(model)

    async def decided(self) -> None:
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
        model.activity.kept = None
        for placement in model.placements:
            placement.unload_when_idle = True
        self._reconciler.poke()

    def set_budget(self, pool: str, size: int | None) -> None:
        self._reconciler.budgets[pool] = size
        self._reconciler.poke()

    # Adding and removing

    def add(self, model: ServedModel) -> None:
        self._reconciler.add(model)

    async def pull(self, name: str, progress: Progress) -> None:
        """Install the model that `name` stands for; continues when its caller leaves.

        Raises as `ModelStore.pull_spec`, what the pull ends with, Overloaded when many are under way, and
        DownloadFailed when the node stops. The store's lock has a second pull of a model wait for the first.
        """
        spec = await self.query_store(lambda store: store.pull_spec(name), math.inf)
        if spec.model_id in {model.id for model in self.models}:
            return
        try:
            installed = await self.query_store(lambda store: store.find(spec) is not None, math.inf)
        except (OSError, ConfigurationError) as error:
            # What is there is damaged, or may no longer be looked into: no mistake of the settings, nor a bug.
            raise ModelError(f"{spec.model_id} cannot be looked up in the store: {error}") from error
        if installed:
            return
        try:
            await self._pulls.result(self._pulls.start(pull(self.store.root, spec.name, progress), f"pull {spec.name}"))
        except NodeError as error:
            # Its caller may answer nobody any more.
            log.warning("the pull of %s failed: %s", spec.name, error.message)
            error.model = spec.model_id
            raise
        # The next request looks for its model again, also for one that failed.
        self._rebuilt_at.clear()
        self._lookups.clear()
        for failed in [model for model in self.failed if model.answers_to(spec.model_id)]:
            with contextlib.suppress(NodeError):
                await self.resolve(failed.name, math.inf)

    async def delete(self, name: str, in_use: WhileInUse = WhileInUse.DRAIN, *, deadline: float = math.inf) -> None:
        """Stop serving a model and remove its files, damaged or not. Raises ModelNotFound, ModelInUse, BadRequest."""
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

    # The node's life

    def start(self) -> None:
        """Load the models that are to be loaded at start-up, and others from now on: returns at once."""
        self._reconciler.start()
        self._renewing = asyncio.create_task(self._renew_stale(), name="renew models")

    async def _renew_stale(self) -> None:
        """Read models again that have changed: what is known of them, as their spaces and passports, is past."""
        while True:
            model = await self._reconciler.stale.get()
            # A profile's own choice is made again by a restart alone.
            renewable = model.if_failed is not None or not self.names.configured(model)
            if renewable and self._look_again is not None:
                await self._look_again()
            if not renewable or not any(known is model for known in self.models):
                continue
            log.warning("model %s has changed; it is read again", model.id)
            if model.if_failed is not None:
                reason = (
                    f"its files in {model.installed.path} have changed, and could not be read again; repair them, or "
                    f"install it again: npu-node pull {model.id}"
                )
                self.failed.append(replace(model.if_failed, reason=reason))
            self.replacement.retire(model)
            self._rebuilt_at.clear()
            self._lookups.clear()
            with contextlib.suppress(NodeError):
                await self.resolve(model.id, math.inf)

    async def close(self) -> None:
        """End pulls; the models are served until `stop`."""
        await self._pulls.close()

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        # Threads end with the call that they are in.
        await self._readings.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.replacement.close()
        await self._reconciler.close()
        await asyncio.gather(*(place.engine.stop() for model in self.models for place in model.placements))


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
