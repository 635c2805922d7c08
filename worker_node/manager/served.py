"""The models of a node, whatever their task: those that it serves, and those of the settings that it cannot serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from worker_node.engines.protocol import EngineState
from worker_node.manager.activity import Activity
from worker_node.manager.placement import Placement
from worker_node.models.catalog import normalise_name
from worker_node.models.manifest import InstalledModel


class ModelState(StrEnum):
    """The state of a model in /health."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its placements in order of preference. Each task adds what its requests need, as a tokenizer.

    `idle_unload_s`: its engines are unloaded when it was idle for so long, unless a request says otherwise.
    `without_files`: what becomes of a model of the settings when its files are deleted; None for any other model.
    """

    installed: InstalledModel
    placements: Sequence[Placement]
    aliases: Sequence[str] = field(default=(), kw_only=True)
    idle_unload_s: float | None = field(default=None, kw_only=True)
    without_files: Callable[[str], FailedModel] | None = field(default=None, kw_only=True, compare=False, repr=False)
    activity: Activity = field(default_factory=Activity, kw_only=True, compare=False, repr=False)

    @property
    def id(self) -> str:
        """The model's name in replies."""
        return self.installed.id

    def facts(self) -> Mapping[str, Any]:
        """What /health says of it beside what it says of every model."""
        return {}

    def abilities(self) -> Sequence[str]:
        """What it can do beside the capability of its task."""
        return ()

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
        coming = [seconds for placement in self.placements if (seconds := placement.ready_in()) is not None]
        soonest = min(coming, default=math.inf)
        return None if math.isinf(soonest) else soonest

    def serving(self) -> Placement | None:
        """The first placement that can serve now."""
        ready = (p for p in self.placements if p.engine.status.state is EngineState.READY)
        return next(ready, None)

    def may_need(self, placement: Placement) -> bool:
        """Whether requests need the placement's engine, or may do so.

        Those that wait for the load of another placement do not: it may be unloaded to make room for that load.
        """
        elsewhere = sum(other.residency.waiters for other in self.placements if other is not placement)
        in_flight = placement.engine.status.in_flight
        return self.activity.running > elsewhere or in_flight > 0 or placement.residency.waiters > 0


@dataclass(frozen=True, slots=True)
class FailedModel:
    """A configured model by its `name` and `aliases`; `reason` names the file and what to do.

    `build` tries again, after the files were repaired; it raises what is wrong with them. `kind` is None where nothing
    says what kind of model it is. `installed`: there are files.
    """

    name: str
    reason: str
    build: Callable[[], ServedModel]
    aliases: Sequence[str] = ()
    kind: str | None = None
    installed: bool = True

    def answers_to(self, name: str) -> bool:
        """Whether a request with that name means this model."""
        return normalise_name(name) in {normalise_name(known) for known in (self.name, *self.aliases)}
