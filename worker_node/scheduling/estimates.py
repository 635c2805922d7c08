"""How fast work drains, measured: pure, the clock is the caller's.

Only the time in which there was work counts, and old observations fade with a half-life, so the rate follows the
device and not the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DrainRate:
    """Units of work finished per second of being busy. A unit is whatever the caller counts: a text, a token."""

    half_life_s: float = 5.0
    _outstanding: float = 0.0
    _units: float = 0.0
    _seconds: float = 0.0
    _since: float = 0.0

    @property
    def outstanding(self) -> float:
        """Units begun and not yet finished or abandoned."""
        return self._outstanding

    def begin(self, units: float, now: float) -> None:
        """So many units of work were admitted."""
        self._advance(now)
        self._outstanding += units

    def end(self, units: float, now: float, *, done: bool) -> None:
        """They were finished (`done`) or given up."""
        self._advance(now)
        self._outstanding = max(0.0, self._outstanding - units)
        if done:
            self._units += units

    def per_second(self, now: float) -> float | None:
        """The measured rate, or None before anything was finished."""
        self._advance(now)
        if self._units <= 0 or self._seconds <= 0:
            return None
        return self._units / self._seconds

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = now
        if self._outstanding > 0:
            fade = 0.5 ** (elapsed / self.half_life_s)
            self._units *= fade
            self._seconds = self._seconds * fade + elapsed
