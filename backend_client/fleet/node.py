"""What a client knows of one node: its report, its availability and that of its models, the work in flight, and the
lease of one request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from backend_client.http.messages import HealthReport, ModelReport, Request, plain_name
from backend_client.lifetime import Clock
from backend_client.options import BreakerOptions
from backend_client.results import FailureKind

# How long a refusal is remembered: until the next probe, that is less than the 5 s in which a node serves again.
_REMEMBERED_S = 3.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A node asked at `since` not to get requests for one model (`busy`: it is full; else it cannot serve).

    It gets none until `until`, which is earlier when a report shows that the reason is gone. `passing`: it is likely to
    serve afterwards. `work`: the requests for the model there, as far as the client knew. However short the pause, for
    3 s it counts as full when it has as much work as when it refused more.
    """

    until: float
    busy: bool
    why: str
    since: float
    passing: bool = True
    work: int = 0

    def after(self, model: ModelReport | None, reported: float) -> Pause | None:
        """What is left of it after a report on the model that was asked for at `reported`; None for nothing."""
        if self.busy:
            # The time that a busy node names is an estimate: half of the work done, it is worth asking. A node that
            # refused without any work had another reason, which no report shows.
            free = self.work > 0 and model is not None and 2 * (model.queue_depth + model.in_flight) <= self.work
            gone = reported >= self.until or (free and reported > self.since)
        else:
            # What was refused while the model loads is asked again when the model serves.
            gone = model is None or not model.loading
        if not gone:
            return self
        return replace(self, until=self.since) if reported < self.since + _REMEMBERED_S else None


class BreakerState(StrEnum):
    """CLOSED lets all requests through, OPEN none, HALF_OPEN exactly one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Availability:
    """Whether requests may go to a node, to one model there, or to a model of the cloud. Pure.

    It is a circuit breaker: failures in a row open it, and one trial request closes it. `reason` says why it was opened
    last. `pauses` are those that a node asked for, by required device.

    The caller asks `admits`, then `begin`s, and reports `succeeded`, `failed` or `abandoned` with the ticket that
    `begin` returned: 0 for an ordinary request, else the trial's number. While the breaker is not closed, only the
    trial that is under way counts; requests that began before it opened, or in an earlier trial, change nothing.
    """

    def __init__(self, options: BreakerOptions, clock: Clock, rng: random.Random) -> None:
        self._options = options
        self._clock = clock
        self._rng = rng
        self.reason: str | None = None
        self.pauses: dict[str | None, Pause] = {}
        # Attempts in a row that got no answer, and when there was the last sign of life, to any request.
        self.silent = 0
        self.heard_at = float("-inf")
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
            self.closed_at = self._clock()
        elif not self.closed:
            return
        self._failures.clear()

    def failed(self, ticket: int, failure: FailureKind, why: str, longest: float | None = None) -> bool:
        """Record a failure by the node's fault. Returns whether it opened the breaker (see `trip`)."""
        if self._is_trial(ticket):
            self.trip(why, longest)
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
        self.trip(why, longest)
        return True

    def abandoned(self, ticket: int) -> None:
        """Record that the caller gave up: no evidence about the node, and the trial is free for another request."""
        if self._is_trial(ticket):
            self._trial = 0

    def trip(self, why: str, longest: float | None = None) -> None:
        """Open now, for `base`·2ⁿ seconds ± jitter, at most `longest` (default: that of the options)."""
        now = self._clock()
        if self.closed and self.closed_at is not None and now - self.closed_at >= self._options.forget:
            self._trips = 0
        # The exponent is bounded too: 2**n of a node that is dead for a week is a number without end.
        pause = self._options.base * 2 ** min(self._trips, 16)
        pause *= self._rng.uniform(1 - self._options.jitter, 1 + self._options.jitter)
        self._until = now + min(self._options.longest if longest is None else longest, pause)
        self._trips += 1
        self.reason = why
        self.closed = False
        self._trial = 0

    def shorten_quarantine(self) -> None:
        """End the quarantine within `recovery` seconds, because there is evidence of recovery."""
        self._until = min(self._until, self._clock() + self._options.recovery)

    def _is_trial(self, ticket: int) -> bool:
        return ticket != 0 and ticket == self._trial


@dataclass(eq=False, slots=True)
class Node:
    """One node: its last report (`models` are those in it), and what this client has under way there.

    `availability` is the node's own, and `of_models` that of each model that was asked for there. `probe_failures`
    counts probes that failed since the last good one; `checked_at` is when a probe last ended; `replied_at` is when it
    last answered a request. `foreign` is the load of other clients by model, as of the last report. `names` are the ids
    and aliases that it lists: the node gets no requests for others.
    """

    url: str
    availability: Availability
    of_models: dict[str, Availability] = field(default_factory=dict)
    report: HealthReport | None = None
    models: dict[str, ModelReport] = field(default_factory=dict)
    probed: bool = False
    probe_failures: int = 0
    checked_at: float = float("-inf")
    replied_at: float = float("-inf")
    outstanding: Counter[str] = field(default_factory=Counter)
    foreign: dict[str, int] = field(default_factory=dict)
    names: dict[str, ModelReport] = field(default_factory=dict)

    def resolve(self, name: str) -> ModelReport | None:
        return self.names.get(plain_name(name))

    def work(self, model: ModelReport | None) -> int:
        """The requests for the model that are under way there, ours and others'."""
        return 0 if model is None else self.outstanding[model.id] + self.foreign.get(model.id, 0)

    def take_report(self, report: HealthReport) -> None:
        models = {model.id: model for model in report.models}
        self.report = report
        self.models = models
        self.names = {plain_name(alias): model for model in report.models for alias in model.aliases}
        self.names |= {plain_name(model.id): model for model in report.models}
        self.foreign = {
            model.id: max(0, model.queue_depth + model.in_flight - self.outstanding[model.id])
            for model in report.models
        }


@dataclass(eq=False, slots=True)
class Lease:
    """A node is lent to one request, at the time `began`. `on_lost` is called when its probes fail.

    `available` is the availability of its model there; `ticket` and `model_ticket` are those of node and model.
    `loading`: the model was not in memory. `waiting_since`: the client waits for the next sign of life since then; None
    while the caller reads.
    """

    node: Node
    request: Request
    model: str
    available: Availability
    ticket: int
    began: float
    model_ticket: int = 0
    loading: bool = False
    lost: bool = False
    waiting_since: float | None = None
    on_lost: Callable[[], None] | None = None
    on_heard: Callable[[], None] | None = None
