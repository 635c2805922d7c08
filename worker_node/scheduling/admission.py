"""Admission control of an engine: grant a permit or reject immediately.

Overload is answered with 429 and a Retry-After from the estimated wait; a request whose deadline would pass in the
queue is refused now rather than served late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Self

from worker_node.core.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.wait_estimate import AdmittedJob, Backlog, Capacity

_UNKNOWN_RATE_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
# A request that is served just too late is wasted work, and in an overload that is every request: so the wait must fit
# the deadline with a margin for an estimate that is too low.
_CAUTION = 1.5
# What batch work leaves free, so that it cannot shut interactive work out.
_BATCH_PLACES = 0.75
# A request for more than this share of the places is treated like batch work there.
_LARGE_REQUEST = 1 / 64


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_outstanding` units (requests; texts, for embeddings) may be queued or running, `parallel` of them at once.

    Nothing is admitted behind a wait of more than `max_wait_s`, whatever its own deadline: a caller who hears so at
    once can ask another node. `sizes` are the static lengths of an embedding engine, ascending; none where shapes are
    dynamic.
    """

    max_outstanding: int
    parallel: int = 1
    max_wait_s: float = 30.0
    capacity: Capacity = field(default_factory=Capacity)
    sizes: tuple[int, ...] = ()

    def computed_tokens(self, tokens: int) -> int:
        """The tokens that the engine computes for a text of so many: static shapes are padded."""
        return next((size for size in self.sizes if tokens <= size), tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """What a request costs, in tokens: those of its prompt or texts, and its most new ones, all used with `exact`."""

    prefill: int = 0
    limit: int = 0
    exact: bool = False


class Permit:
    """An admitted request, while the block runs; later estimates are based on its progress.

    Entering raises as `Admission.permit`.
    """

    __slots__ = ("_admission", "_deadline", "_interactive", "_job", "_units", "_work")

    def __init__(self, admission: Admission, units: int, deadline: float, work: Work, *, interactive: bool) -> None:
        self._admission = admission
        self._units = units
        self._deadline = deadline
        self._work = work
        self._interactive = interactive
        self._job: AdmittedJob

    def __enter__(self) -> Self:
        admission, work = self._admission, self._work
        admission.check(self._units, self._deadline, work=work, interactive=self._interactive)
        self._job = AdmittedJob(work.prefill, work.limit, work.exact, self._interactive)
        admission.outstanding += self._units
        admission.backlog.add(self._job)
        return self

    def __exit__(self, *_error: object) -> None:
        self._admission.outstanding -= self._units
        self._admission.backlog.remove(self._job)

    def progressed(self, tokens: int, *, at: float | None = None, prefilled: tuple[int, float] = (0, 0.0)) -> None:
        """Record new tokens at `at` (monotonic; None: now).

        Before that the engine computed the `prefilled` tokens of any prompts, in so many seconds.
        """
        self._admission.backlog.measured(*prefilled)
        self._admission.backlog.progressed(self._job, tokens, at=self._admission.clock() if at is None else at)

    def restarted(self) -> None:
        """Record that the engine ended, and another one begins the request."""
        self._admission.backlog.restart(self._job)

    def answered(self) -> None:
        """Record that the answer ended, by itself or at its limit."""
        self._admission.backlog.answered(self._job)

    def measured(self, tokens: int, seconds: float) -> None:
        """Record that the engine computed so many tokens in so many seconds while more work was waiting."""
        self._admission.backlog.measured(tokens, seconds)


@dataclass(slots=True)
class Admission:
    """Permits for one engine. `what` names it in refusals."""

    what: str
    limits: AdmissionLimits
    clock: Callable[[], float] = time.monotonic
    outstanding: int = 0
    backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.limits.capacity)

    @property
    def queue_depth(self) -> int:
        """Units waiting behind those that run."""
        return max(0, self.outstanding - self.limits.parallel)

    def expected_wait(self, *, interactive: bool = True, tokens: int = 0) -> float | None:
        """Seconds until work of this priority admitted now would begin to run; None while nothing was measured.

        `tokens` are those of its prompt or texts; without them it is taken for short.
        """
        return self.backlog.wait(interactive=interactive, tokens=tokens)

    def permit(
        self, units: int, deadline: float, *, work: Work | None = None, interactive: bool = True
    ) -> AbstractContextManager[Permit]:
        """Hold a permit for `units` while the block runs; batch work may take three quarters of the places.

        Entering raises Overloaded when the queue is full or the deadline would pass in it, DeadlineExceeded when it has
        passed.
        """
        return Permit(self, units, deadline, work or Work(), interactive=interactive)

    @contextmanager
    def waiting(self, units: int, *, interactive: bool = True) -> Iterator[None]:
        """Take places in the queue while a request waits for its engine to be restarted. Raises Overloaded."""
        self._check_places(units, interactive=interactive)
        self.outstanding += units
        try:
            yield
        finally:
            self.outstanding -= units

    def check(self, units: int, deadline: float, *, work: Work | None = None, interactive: bool = True) -> None:
        """Raise what `permit` would, and take nothing. Without `work` only the wait before it is looked at."""
        now = self.clock()
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed before {self.what} could begin")
        self._check_places(units, interactive=interactive)
        # By itself a request is given the time that it asks for; behind others, only what it is likely to need.
        own = 0.0 if work is None else self.backlog.own_prefill_s(work.prefill)
        acceptable = min(self.limits.max_wait_s, (deadline - now - own) / _CAUTION)
        wait = self.backlog.wait(interactive=interactive, tokens=0 if work is None else work.prefill)
        if wait and wait > acceptable:
            most_s, left = self.limits.max_wait_s, deadline - now
            why = (
                f"{most_s:g} s that anything is queued for"
                if acceptable >= most_s
                else f"{max(0.0, acceptable):.1f} s accepted of a request that has {left:.1f} s until its deadline"
            )
            raise Overloaded(
                f"{self.what} is busy: the wait of about {wait:.1f} s is longer than the {why}",
                retry_after=_retry_after(wait),
            )

    def _check_places(self, units: int, *, interactive: bool) -> None:
        places, whose = self.limits.max_outstanding, ""
        if not interactive or units > max(1, places * _LARGE_REQUEST):
            whose = " for large requests" if interactive else " for batch work"
            places = math.ceil(places * _BATCH_PLACES)
        if self.outstanding and self.outstanding + units > places:
            raise Overloaded(
                f"{self.what} is busy: {self.outstanding} of {places} places{whose} are taken",
                retry_after=_retry_after(self.backlog.soonest_end()),
            )


def _retry_after(wait: float | None) -> float:
    return _UNKNOWN_RATE_RETRY_S if wait is None else min(_MAX_RETRY_AFTER_S, max(0.05, wait))
