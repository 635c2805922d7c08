"""The latest failed requests, for operators: what failed, where and when, and nothing of what was sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from worker_node.core.errors import NodeError

_KEPT = 50


@dataclass(frozen=True, slots=True)
class Failure:
    """Failures of one sort. `route` is the HTTP route as declared; `first` and `last` are `time.time()`.

    `model` and `device` are None for a request that was refused before it had a placement.
    """

    code: str
    status: int
    route: str
    model: str | None
    device: str | None
    count: int
    first: float
    last: float


@dataclass(slots=True)
class RecentFailures:
    """Bounded: equal failures are one entry with a count, and of the others the oldest is forgotten.

    So a caller who repeats a mistake hides no other failure.
    """

    clock: Callable[[], float] = time.time
    kept: int = _KEPT
    _entries: dict[tuple[str, str, str | None, str | None], Failure] = field(default_factory=dict)

    def add(self, error: NodeError, route: str) -> None:
        """A request to `route` ended with `error`."""
        now = self.clock()
        key = (error.code, route, error.model, error.device)
        known = self._entries.pop(key, None)
        if known is None:
            known = Failure(error.code, error.status, route, error.model, error.device, 0, now, now)
        self._entries[key] = replace(known, count=known.count + 1, last=now)
        if len(self._entries) > self.kept:
            del self._entries[next(iter(self._entries))]

    def latest_first(self) -> list[Failure]:
        """The entries, the one that failed last before the others."""
        return list(reversed(self._entries.values()))
