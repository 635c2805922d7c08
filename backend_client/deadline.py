"""The time by which a call must be over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backend_client.options import LONGEST_S, RetryOptions

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


# The retry budget: failures may add a tenth to the load, not multiply it.


class RetryBudget:
    """A token bucket, one for the whole client. Every call pays `per_request` in, every second `per_second`; a retry
    costs 1.

    So from the client's start on, retries never exceed `initial + per_request × calls + per_second × seconds`.
    `refused` counts those that were refused.
    """

    def __init__(self, options: RetryOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._balance = options.initial
        self._filled_at = clock()
        self.refused = 0

    @property
    def balance(self) -> float:
        """Retries that could be made now. Changes nothing, so that any thread may ask."""
        return self._balance_at(self._clock())

    @property
    def affords_one(self) -> bool:
        """Whether a retry could be made now."""
        # Float: ten deposits of 0.1 sum to just under 1.0.
        return self.balance >= 1.0 - 1e-9

    def deposit(self) -> None:
        """Record that a call starts."""
        self._balance = min(self._options.saved, self._balance + self._options.per_request)

    def withdraw(self) -> bool:
        """Take one retry. Return False if none is left; the call then fails with its last error."""
        self._fill()
        if not self.affords_one:
            self.refused += 1
            return False
        self._balance = max(0.0, self._balance - 1.0)
        return True

    def _fill(self) -> None:
        now = self._clock()
        self._balance = self._balance_at(now)
        self._filled_at = now

    def _balance_at(self, now: float) -> float:
        earned = (now - self._filled_at) * self._options.per_second
        return min(self._options.saved, self._balance + earned)
