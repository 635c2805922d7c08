"""The door of an engine: a permit, or a refusal at once.

Overload is answered with 429 and a Retry-After from the measured drain rate; a request whose deadline would pass in
the queue is refused now rather than served late. Pure but for the permits that callers hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker_node.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.estimates import DrainRate

_UNKNOWN_RATE_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
# A request that is served just too late is work for nothing, and in an overload that is every request: so the wait
# must fit the deadline with room for its own run and for an estimate that is too good.
_CAUTION = 1.5
# What batch work leaves free, so that it cannot shut interactive work out.
_BATCH_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_outstanding` units may be queued or running; the engine works on `parallel` of them at once.

    Nothing is admitted behind a wait of more than `max_wait_s`, whatever its own deadline: a caller who hears so at
    once can ask another node.
    """

    max_outstanding: int
    parallel: int = 1
    max_wait_s: float = 30.0


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
    def permit(self, units: int, deadline: float, *, interactive: bool = True) -> Iterator[None]:
        """Hold a permit for `units` while the block runs; batch work may take three quarters of the places.

        Raises Overloaded when the queue is full or the deadline would pass in it, DeadlineExceeded when it has passed.
        """
        self.check(units, deadline, interactive=interactive)
        self.rate.begin(units, self.clock())
        done = False
        try:
            yield
            done = True
        except DeadlineExceeded:
            # It left the queue by its deadline: were it not counted, overload would make the engine look slower and
            # slower.
            done = True
            raise
        finally:
            self.rate.end(units, self.clock(), done=done)

    def check(self, units: int, deadline: float, *, interactive: bool = True) -> None:
        """Raise what `permit` would, and take nothing."""
        now = self.clock()
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed before {self.what} could begin")
        places = self.limits.max_outstanding if interactive else math.ceil(self.limits.max_outstanding * _BATCH_SHARE)
        if self.outstanding and self.outstanding + units > places:
            whose = "" if interactive else " for batch work"
            raise Overloaded(
                f"{self.what} is busy: {self.outstanding} of {places} places{whose} are taken",
                retry_after=self._retry_after(),
            )
        wait = self.expected_wait()
        if wait is not None and (wait > self.limits.max_wait_s or wait * _CAUTION > deadline - now):
            raise Overloaded(
                f"{self.what} is busy: the wait of about {wait:.1f} s is longer than the request's deadline or the "
                f"{self.limits.max_wait_s:g} s that anything is queued for",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> float:
        wait = self.expected_wait()
        return _UNKNOWN_RATE_RETRY_S if wait is None else min(_MAX_RETRY_AFTER_S, max(0.05, wait))
