"""The models of a node, whatever their task: those that it serves, their names, and those that it cannot serve."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from worker_node.core.errors import BadRequest, ModelNotFound
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import ExcludedPlacement, Placement
from worker_node.models.catalog import Catalog, normalise_name
from worker_node.models.directory import InstalledModel


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """`seconds` after its last use a model is unloaded, counted from `since` at the earliest; None: it stays."""

    seconds: float | None
    since: float


@dataclass(slots=True)
class Activity:
    """Counts the requests that a model works on: `running` of them run or wait for an engine.

    `clock` is monotonic seconds; `on_idle` is called after the last request. `kept` is the keep-alive that a request
    set; without it that of the settings holds.
    """

    clock: Callable[[], float] = time.monotonic
    on_idle: Callable[[], None] | None = None
    kept: KeepAlive | None = None
    running: int = 0
    _since: float = field(init=False)
    idle: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._since = self.clock()
        self.idle.set()

    @contextmanager
    def working(self) -> Iterator[None]:
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._since = self.clock()
                self.idle.set()
                if self.on_idle is not None:
                    self.on_idle()

    @property
    def idle_since(self) -> float | None:
        return None if self.running else self._since


class ModelState(StrEnum):
    """The state of a model in /health."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model with its placements in order of preference. Each task adds what its requests need, as a tokenizer.

    `idle_unload_s`: its engines are unloaded when it was idle for so long, unless a request says otherwise.
    `if_failed` is what a model of the settings becomes when it can be served no longer; None for any other model.
    `excluded` are the devices that it may not run on.
    """

    installed: InstalledModel
    placements: Sequence[Placement] = field(default=(), kw_only=True)
    aliases: Sequence[str] = field(default=(), kw_only=True)
    idle_unload_s: float | None = field(default=None, kw_only=True)
    if_failed: FailedModel | None = field(default=None, kw_only=True, repr=False)
    excluded: Sequence[ExcludedPlacement] = field(default=(), kw_only=True)
    activity: Activity = field(default_factory=Activity, kw_only=True, repr=False)

    @property
    def id(self) -> str:
        return self.installed.id

    @property
    def keep_s(self) -> float | None:
        """How long it stays loaded after its last use; None if it stays."""
        kept = self.activity.kept
        return self.idle_unload_s if kept is None else kept.seconds

    def unloads_at(self) -> float | None:
        """When it is unloaded if it stays idle; None if it stays loaded or is in use."""
        idle_since, kept = self.activity.idle_since, self.activity.kept
        if self.keep_s is None or idle_since is None:
            return None
        loaded = max((placement.ready_at for placement in self.placements), default=0.0)
        return max(idle_since, loaded, 0.0 if kept is None else kept.since) + self.keep_s

    def facts(self) -> Mapping[str, Any]:
        """What /health says of it beside what it says of every model."""
        return {}

    def abilities(self) -> Sequence[str]:
        return ()

    async def token_ids(self, text: str, *, special: bool, deadline: float) -> list[int]:  # noqa: ARG002
        """Token ids, with special ones if `special`. Raises BadRequest for a model without texts, and as `text_ids`."""
        raise BadRequest(f"model {self.id} takes no texts, so it has no tokens of them", param="model")

    def template(self) -> str:
        """The template that its conversations are written with; empty where it has none."""
        return ""

    def state(self) -> ModelState:
        """`ready` and `degraded` models take requests: `degraded` ones on a placement other than the preferred one.

        `loading`: no engine serves, but one is being started, for the first time or again. `unloaded`: the preferred
        engine is loaded when a request needs it.
        """
        states = [placement.state for placement in self.placements]
        if states[0] is EngineState.READY:
            return ModelState.READY
        if states[0] is EngineState.UNLOADED:
            return ModelState.READY if EngineState.READY in states else ModelState.UNLOADED
        if EngineState.READY in states:
            return ModelState.DEGRADED
        if EngineState.STARTING in states or EngineState.BACKING_OFF in states:
            return ModelState.LOADING
        # A placement that is loaded on demand takes requests, too.
        return ModelState.DEGRADED if EngineState.UNLOADED in states else ModelState.FAILED

    def ready_in(self) -> float | None:
        """Seconds that a request is likely to wait for a model that is loading; None for any other, or if unknown."""
        if self.state() is not ModelState.LOADING:
            return None
        coming = [placement.ready_in() for placement in self.placements]
        return min((seconds for seconds in coming if seconds is not None and seconds < math.inf), default=None)

    def serving(self) -> Placement | None:
        return next((place for place in self.placements if place.state is EngineState.READY), None)

    def may_need(self, placement: Placement) -> bool:
        """Whether requests need the placement's engine, or may do so.

        Those that wait for the load of another placement do not: it may be unloaded to make room for that load.
        """
        elsewhere = sum(other.waiters for other in self.placements if other is not placement)
        in_flight = placement.engine.status.in_flight
        return self.activity.running > elsewhere or in_flight > 0 or placement.waiters > 0


@dataclass(frozen=True, slots=True)
class FailedModel:
    """A configured model by its `name` and `aliases`; `reason` names the file and what to do.

    `build` tries again, after the files were repaired; it raises what is wrong with them. `kind` is None where nothing
    says what kind of model it is. `installed`: there are files. `excluded`: the devices that it may not run on.
    """

    name: str
    reason: str
    build: Callable[[], ServedModel]
    aliases: Sequence[str] = ()
    kind: str | None = None
    installed: bool = True
    excluded: Sequence[ExcludedPlacement] = ()

    def answers_to(self, name: str) -> bool:
        return normalise_name(name) in {normalise_name(known) for known in (self.name, *self.aliases)}


class Names:
    """The served models by every name, and the configured ones that failed, in the order of the settings."""

    def __init__(self, catalog: Catalog, models: Iterable[ServedModel | FailedModel] = ()) -> None:
        self._catalog = catalog
        configured = list(models)
        self.failed = [model for model in configured if isinstance(model, FailedModel)]
        self._places: dict[str, int] = {}
        self.serve(model for model in configured if isinstance(model, ServedModel))
        self.arrange([model.name if isinstance(model, FailedModel) else model.id for model in configured])

    def serve(self, models: Iterable[ServedModel]) -> None:
        last = len(self._places)
        self.models = tuple(sorted(models, key=lambda model: self._places.get(normalise_name(model.id), last)))
        self._by_id = {normalise_name(model.id): model for model in self.models}
        self._by_alias = {normalise_name(alias): model for model in self.models for alias in model.aliases}
        # The names of the sources that models were pulled from; of several models the first.
        sources = [(normalise_name(alias), model) for model in self.models for alias in model.installed.aliases]
        self._by_source = dict(reversed(sources))

    def arrange(self, ids: Sequence[str]) -> None:
        """Set the order of these models, others after them: the first of a kind is its default."""
        self._places = {normalise_name(name): place for place, name in enumerate(ids)}
        self.serve(self.models)

    def configured(self, model: ServedModel) -> bool:
        return normalise_name(model.id) in self._places

    def drop_failed(self, name: str) -> None:
        self.failed = [failed for failed in self.failed if failed.name != name]

    def aliases(self, model: ServedModel) -> list[str]:
        """The names beside its id that `find` takes for the model, in lower case."""
        entry = self._catalog.find(model.id)
        known = entry.aliases if entry and normalise_name(entry.id) == normalise_name(model.id) else ()
        names = {
            normalise_name(name) for name in (*model.aliases, *model.installed.aliases, *known)
        } - self._by_id.keys()
        return sorted(n for n in names if self._by_alias.get(n, self._by_source.get(n, model)) is model)

    def default(self, kind: str) -> ServedModel:
        """The model for requests that name none. Raises ModelNotFound."""
        for model in self.models:
            if model.installed.kind == kind:
                return model
        raise ModelNotFound(f"this node serves no {kind} model; it serves: {self._known()}", param="model")

    def find(self, name: str) -> ServedModel:
        """The model of that id, else alias of the settings, source, alias of the catalog. Raises ModelNotFound."""
        if (exact := self._by_id.get(name)) is not None:
            return exact
        wanted = normalise_name(name)
        found = self._by_id.get(wanted) or self._by_alias.get(wanted) or self._by_source.get(wanted)
        if found is None and (entry := self._catalog.find(name)) is not None:
            found = self._by_id.get(normalise_name(entry.id))
        if found is None:
            hint = self._catalog.suggest(name, [model.id for model in self.models]) or f"; served: {self._known()}"
            raise ModelNotFound(f"model {name[:100]!r} is not served here{hint}", param="model")
        return found

    def _known(self) -> str:
        return ", ".join(model.id for model in self.models) or "none"
