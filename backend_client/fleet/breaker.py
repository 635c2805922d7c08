"""The circuit breaker of one node (and of the cloud): failures in a row open it, one trial request closes it."""

from __future__ import annotations

import random
from collections import Counter
from enum import StrEnum

from backend_client.lifetime import Clock
from backend_client.options import BreakerOptions
from backend_client.results import FailureKind


class BreakerState(StrEnum):
    """CLOSED lets all requests through, OPEN none, HALF_OPEN exactly one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Pure: takes reports of what happened and decides whether a request may go.

    The caller asks `admits`, then `begin`s, and reports `succeeded`, `failed` or `abandoned` with the ticket that
    `begin` returned: 0 for an ordinary request, else the trial's number. While the breaker is not closed, only the
    trial that is under way counts; requests that began before it opened, or in an earlier trial, change nothing.
    """

    def __init__(self, options: BreakerOptions, clock: Clock, rng: random.Random) -> None:
        self._options = options
        self._clock = clock
        self._rng = rng
        self._failures = Counter[FailureKind]()
        self.closed = True
        """Whether all requests may go."""
        self._until = 0.0
        self._trips = 0
        self._tickets = 0
        self._trial = 0
        self.closed_at: float | None = None

    @property
    def state(self) -> BreakerState:
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def opens_in(self) -> float:
        """Seconds until the quarantine ends; 0 when there is none."""
        return max(0.0, self._until - self._clock()) if not self.closed else 0.0

    def admits(self) -> bool:
        return self.closed or (not self._trial and self._clock() >= self._until)

    def begin(self) -> int:
        """Record that a request is sent. Returns its ticket."""
        if self.closed:
            return 0
        self._tickets += 1
        self._trial = self._tickets
        return self._trial

    def succeeded(self, ticket: int) -> None:
        """Record that the node answered, be it with a refusal."""
        if self._is_trial(ticket):
            self.closed = True
            self._trial = 0
            self._failures.clear()
            self.closed_at = self._clock()
        elif self.closed:
            self._failures.clear()

    def failed(self, ticket: int, failure: FailureKind, longest: float | None = None) -> bool:
        """Record a failure by the node's fault. Returns whether it opened the breaker (see `trip`)."""
        if self._is_trial(ticket):
            self.trip(longest)
            return True
        if not self.closed or failure is FailureKind.NONE:
            return False
        self._failures[failure] += 1
        limits = {
            FailureKind.CONNECTION: self._options.connection_failures,
            FailureKind.SERVER: self._options.server_failures,
        }
        if self._failures[failure] < limits[failure]:
            return False
        self.trip(longest)
        return True

    def abandoned(self, ticket: int) -> None:
        """Record that the caller gave up: no evidence about the node, and the trial is free for another request."""
        if self._is_trial(ticket):
            self._trial = 0

    def trip(self, longest: float | None = None) -> None:
        """Open now, for `base`·2ⁿ seconds ± jitter, at most `longest` (default: that of the options)."""
        now = self._clock()
        if self.closed and self.closed_at is not None and now - self.closed_at >= self._options.forget:
            self._trips = 0
        # The exponent is bounded too: 2**n of a node that is dead for a week is a number without end.
        pause = self._options.base * 2 ** min(self._trips, 16)
        pause *= self._rng.uniform(1 - self._options.jitter, 1 + self._options.jitter)
        self._until = now + min(self._options.longest if longest is None else longest, pause)
        self._trips += 1
        self.closed = False
        self._trial = 0

    def shorten_quarantine(self) -> None:
        """End the quarantine within `recovery` seconds, because there is evidence of recovery."""
        self._until = min(self._until, self._clock() + self._options.recovery)

    def _is_trial(self, ticket: int) -> bool:
        return ticket != 0 and ticket == self._trial
