"""Events of the node since it started, for people who open the dashboard later. In memory, bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.node import Node

Level = Literal["good", "warn", "bad", "off"]
KEPT = 200
_WORDS: dict[EngineState, tuple[str, Level]] = {
    EngineState.UNLOADED: ("not loaded", "off"),
    EngineState.STARTING: ("loading", "warn"),
    EngineState.READY: ("ready", "good"),
    EngineState.BACKING_OFF: ("down", "bad"),
    EngineState.QUARANTINED: ("quarantined", "bad"),
    EngineState.FAILED: ("failed", "bad"),
    EngineState.STOPPED: ("stopped", "off"),
}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """`at` is Unix time; `subject` an engine ("model on DEVICE") or the node; `why` is None if not known."""

    at: float
    subject: str
    what: str
    level: Level
    why: str | None = None


class EventLog:
    """The latest events. Pure: the caller passes the engines, which are compared with those of the last call."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[NodeEvent] = deque(maxlen=KEPT)
        self._seen: dict[str, tuple[EngineState, int]] = {}

    def add(self, subject: str, what: str, level: Level, why: str | None = None) -> None:
        """Add an event that happened now."""
        self._events.append(NodeEvent(round(self._clock(), 3), subject, what, level, why))

    def observe(self, engines: Iterable[tuple[str, EngineStatus]]) -> None:
        """Compare the engines, by name, with the last call: changes of state, restarts, engines added and removed."""
        now = dict(engines)
        for name, status in now.items():
            before = self._seen.get(name)
            self._seen[name] = (status.state, status.restarts)
            if before == self._seen[name]:
                continue
            word, level = _WORDS[status.state]
            if before is not None and status.restarts > before[1] and status.state is EngineState.READY:
                # It fell and came back between two looks.
                self.add(name, "restarted", "bad", status.reason)
            elif before is None or status.state is not before[0]:
                self.add(name, word, level, status.reason if status.reason != word else None)
        for name in self._seen.keys() - now.keys():
            del self._seen[name]
            self.add(name, "removed", "off")

    def latest_first(self) -> list[dict[str, Any]]:
        """The events as JSON, the last one first."""
        return [asdict(event) for event in reversed(self._events)]


def engines_of(node: Node) -> Iterable[tuple[str, EngineStatus]]:
    """Every engine of the node by the name that events have."""
    for model in node.manager.models:
        for placement in model.placements:
            yield f"{model.id} on {placement.device}", placement.engine.status
