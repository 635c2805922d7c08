"""How long the NPU was busy with a run: the counter read immediately before and after it, in the engine's process.

The kernel counts for the whole device, whoever uses it. So a difference proves that the NPU worked, but not that it
worked for this engine alone. Sharing is detected when the counter moved between runs of this engine, or by more than a
run lasted. The counter cannot show that the NPU was not shared, so this is never claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

# The driver marks the device idle a moment after the result is there, and both clocks are read one after the other.
TOLERANCE_US = 1_000


class Counter(Protocol):
    """A cumulative count of busy microseconds."""

    def read(self) -> int | None:
        """The count, or None where it cannot be read."""
        ...

    def ran(self, seconds: float) -> None:
        """Record that a run on the device lasted for `seconds` more; only a stand-in uses it."""
        ...


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy microseconds during a run (None: unknown), and whether others are known to have used the device."""

    us: int | None
    shared: bool = False


@dataclass(slots=True)
class BusyMeter:
    """Measures run after run of one engine. Call `begin` before and `end` after each, `so_far` in between."""

    counter: Counter
    clock: Callable[[], float] = time.monotonic
    _rest: int | None = None
    _before: int | None = None
    _began: float = 0.0
    _told: float = field(default=0.0)
    _shared: bool = False

    def rest(self) -> None:
        """Read the counter now: its changes so far (loading, compiling) were this engine's own, and no run."""
        self._rest = self.counter.read()

    def begin(self) -> None:
        """Start a measurement immediately before a run."""
        self._before = self.counter.read()
        self._shared = (
            self._before is not None and self._rest is not None and abs(self._before - self._rest) > TOLERANCE_US
        )
        self._began = self._told = self.clock()

    def so_far(self) -> Busy:
        """Busy time since `begin`; None also when the counter went backwards. A run once seen to be shared stays so."""
        now = self.clock()
        self.counter.ran(now - self._told)
        self._told = now
        count = self.counter.read()
        if count is None or self._before is None or count < self._before:
            return Busy(None, self._shared)
        us = count - self._before
        # By a clock read after the counter: held up between the two, we must not take our own run for another's.
        if us > (self.clock() - self._began) * 1e6 + TOLERANCE_US:
            self._shared = True
        return Busy(us, self._shared)

    def end(self) -> Busy:
        """Finish the measurement after a run."""
        busy = self.so_far()
        self._rest = self.counter.read()
        return busy


@dataclass(slots=True)
class Utilisation:
    """The share of wall time that the NPU was busy between two looks at the counter, at least `shortest_s` apart.

    Looks that follow each other faster get the last share again, so that many watchers do not disturb each other.
    """

    shortest_s: float = 1.0
    _at: float | None = None
    _count: int = 0
    _share: float | None = None

    def look(self, count: int | None, now: float) -> float | None:
        """Return the share, 0 to 1; None before the second look, or when the counter is unknown or went backwards."""
        if count is None:
            self._at = self._share = None
        elif self._at is None or count < self._count:
            self._at, self._count, self._share = now, count, None
        elif now - self._at >= self.shortest_s:
            self._share = min(1.0, (count - self._count) / 1e6 / (now - self._at))
            self._at, self._count = now, count
        return self._share
