"""A model that this node serves, whatever its task, and the state that /health reports for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from worker_node.engines.base import EngineState
from worker_node.manager.activity import Activity
from worker_node.manager.placement import Placement
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
    """

    installed: InstalledModel
    placements: Sequence[Placement]
    aliases: Sequence[str] = field(default=(), kw_only=True)
    idle_unload_s: float | None = field(default=None, kw_only=True)
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
