"""The door of an engine: a permit, or a refusal at once.

Overload is answered with 429 and a Retry-After from the measured drain rate; a request whose deadline would pass in
the queue is refused now rather than served late. Pure but for the permits that callers hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker_node.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.estimates import DrainRate

_UNKNOWN_RATE_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_outstanding` units may be queued or running; the engine works on `parallel` of them at once."""

    max_outstanding: int
    parallel: int = 1


@dataclass(slots=True)
class Admission:
    """Permits for one engine. `what` names it in refusals."""

    what: str
    limits: AdmissionLimits
    clock: Callable[[], float] = time.monotonic
    rate: DrainRate = field(default_factory=DrainRate)

    @property
    def outstanding(self) -> int:
        """Units queued or running."""
        return int(self.rate.outstanding)

    @property
    def queue_depth(self) -> int:
        """Units waiting behind those that run."""
        return max(0, self.outstanding - self.limits.parallel)

    def expected_wait(self) -> float | None:
        """Seconds until a unit admitted now would begin to run; None while nothing has been measured."""
        if self.queue_depth == 0 and self.outstanding < self.limits.parallel:
            return 0.0
        rate = self.rate.per_second(self.clock())
        return None if rate is None else (self.outstanding - self.limits.parallel + 1) / rate

    @contextmanager
    def permit(self, units: int, deadline: float) -> Iterator[None]:
        """Hold a permit for `units` while the block runs.

        Raises Overloaded when the queue is full or the deadline would pass in it, DeadlineExceeded when it has passed.
        """
        now = self.clock()
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed before {self.what} could begin")
        if self.outstanding and self.outstanding + units > self.limits.max_outstanding:
            raise Overloaded(
                f"{self.what} is busy: {self.outstanding} of {self.limits.max_outstanding} places are taken",
                retry_after=self._retry_after(),
            )
        wait = self.expected_wait()
        if wait is not None and now + wait > deadline:
            raise Overloaded(
                f"{self.what} is busy: the wait of about {wait:.1f} s is longer than the request's deadline",
                retry_after=self._retry_after(),
            )
        self.rate.begin(units, now)
        done = False
        try:
            yield
            done = True
        finally:
            self.rate.end(units, self.clock(), done=done)

    def _retry_after(self) -> float:
        wait = self.expected_wait()
        return _UNKNOWN_RATE_RETRY_S if wait is None else min(_MAX_RETRY_AFTER_S, max(0.05, wait))
