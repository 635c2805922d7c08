"""Measured rates of work: pure arithmetic, no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rate:
    """Units of work per second. An observation loses half of its weight with each `memory` units that follow it.

    Time without work changes nothing, so the rate follows the device and not the traffic.
    """

    memory: float
    _units: float = 0.0
    _seconds: float = 0.0

    def measured(self, units: float, seconds: float) -> None:
        """Record that so many units took so many seconds; zero seconds for units computed along with other work."""
        if units <= 0 or seconds < 0:
            return
        kept: float = 0.5 ** (units / self.memory)
        self._units = self._units * kept + units
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float | None:
        """The measured rate, or None before any work took time."""
        return self._units / self._seconds if self._seconds > 0 else None


@dataclass(slots=True)
class Load:
    """Seconds of work that arrive per second, over the last `half_life_s`. The clock is the caller's."""

    half_life_s: float = 10.0
    _work_s: float = 0.0
    _weight_s: float = 0.0
    _at: float | None = None

    def arrived(self, seconds: float, now: float) -> None:
        """Record that work of so many seconds arrived."""
        self._advance(now)
        self._work_s += seconds

    def share(self, now: float) -> float:
        """The share of the time that this work takes; above 1 if more arrives than can be done."""
        self._advance(now)
        # As if an idle second had gone before, so that a first arrival is not taken for a flood.
        return self._work_s / (self._weight_s + 1.0)

    def _advance(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept: float = 0.5 ** (elapsed / self.half_life_s)
        self._work_s *= kept
        self._weight_s = self._weight_s * kept + elapsed
