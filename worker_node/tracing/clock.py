"""Wall times, which spans have, from monotonic ones, which everything else here has."""

from __future__ import annotations

import time

# A reading during which the process was put to sleep says nothing.
_TIGHT_NS = 50_000
# What is less than this is jitter of the reading; what is more, somebody set the clock.
_STEP_NS = 1_000_000


class WallClock:
    """Nanoseconds since the epoch. All spans of a request are dated by one offset, so that none begins before its
    parent does."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()
        self.look()

    def look(self) -> None:
        """Follow the wall clock, if it was set since the last look."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        offset = wall - (before + after) // 2
        if after - before < _TIGHT_NS and abs(offset - self._offset) > _STEP_NS:
            self._offset = offset

    def at(self, monotonic: float) -> int:
        """The wall time at `time.monotonic()` seconds."""
        return self._offset + round(monotonic * 1e9)

    def now(self) -> int:
        """The wall time now."""
        return self._offset + time.monotonic_ns()
