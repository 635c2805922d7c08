"""The time by which a call must be over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backend_client.options import LONGEST_S

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is a time of `clock`, which is monotonic. What travels is always the remaining time, never a timestamp."""

    at: float
    clock: Clock = field(default=time.monotonic, repr=False)

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `seconds` from now, at most `LONGEST_S`."""
        return cls(clock() + min(seconds, LONGEST_S), clock)

    def remaining(self) -> float:
        """Seconds left; 0 when the time is up."""
        left = self.at - self.clock()
        return max(0.0, left)

    def remaining_ms(self) -> int:
        """Whole milliseconds left, rounded down: the node must not think it has longer than we wait."""
        return int(self.remaining() * 1000)

    def earlier(self, seconds: float) -> Deadline:
        """The deadline that many seconds before this one."""
        return Deadline(self.at - seconds, self.clock)
