"""How long models stay in memory after their last use: `idle_unload_s` of the settings, or what a request asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker_node.manager.served import ServedModel


@dataclass(frozen=True, slots=True)
class _Kept:
    """The keep-alive that a request set: seconds after the last use, counted from `since` at the earliest; None for
    good.
    """

    seconds: float | None
    since: float


@dataclass(slots=True)
class Keeping:
    """Keep-alives that requests set, by model id. `clock` is monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Unload the model when it has been idle for `seconds`; None keeps it for good."""
        self._kept[model.id] = _Kept(seconds, self.clock())

    def forget(self, model: ServedModel) -> None:
        """Return to the keep-alive of the settings."""
        self._kept.pop(model.id, None)

    def until(self, model: ServedModel) -> float | None:
        """When the model is unloaded if it stays idle; None if it stays loaded or is in use."""
        idle_since, seconds = model.activity.idle_since, self._seconds(model)
        if seconds is None or idle_since is None:
            return None
        kept = self._kept.get(model.id)
        loaded = max((placement.residency.ready_at for placement in model.placements), default=0.0)
        return max(idle_since, loaded, kept.since if kept is not None else 0.0) + seconds

    def expires_in(self, model: ServedModel) -> float | None:
        """Seconds until `until`; for a model in use, the seconds from its last use on. None if it stays."""
        until = self.until(model)
        return self._seconds(model) if until is None else max(0.0, until - self.clock())

    def _seconds(self, model: ServedModel) -> float | None:
        kept = self._kept.get(model.id)
        return model.idle_unload_s if kept is None else kept.seconds
