"""The client's state of one node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from backend_client._fleet.liveness import Silence
from backend_client._protocol.names import plain_name
from backend_client._protocol.report import HealthReport, ModelKind, ModelReport
from backend_client._resilience.breaker import Breaker

# How long a refusal is remembered: until the next probe, that is less than the 5 s in which a node serves again.
_REMEMBERED_S = 3.0


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request asks of the node that serves it. `model` None: the node's default of that kind.

    `node`: only this one will do, because it stores what the request refers to.
    """

    kind: ModelKind
    model: str | None = None
    device: str | None = None
    space: str | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """A node asked not to get requests for one model until `promised` (`busy`: it is full; else it cannot serve).
    `passing`: it is likely to serve afterwards.

    It asked at `since`, with `work` requests for the model there, as far as the client knew. It gets none until
    `until`, which is earlier when a report shows that it is no longer busy; not so when the hold is `firm`. However
    short the pause, for 3 s it counts as full when it has as much work as when it refused more.
    """

    until: float
    busy: bool
    why: str
    passing: bool = True
    since: float = float("-inf")
    work: int = 0
    firm: bool = False
    promised: float = float("-inf")

    @classmethod
    def of(cls, pause: float, why: str, now: float, *, work: int = 0, before: Hold | None = None) -> Hold:
        """A busy node asked for a pause; `before` is what it asked before."""
        # Its reports said once that it was free, and it was not: now it is taken at its word.
        firm = before is not None and before.promised > now and before.until <= now
        return cls(now + pause, busy=True, why=why, since=now, work=work, firm=firm, promised=now + pause)

    def after(self, model: ModelReport | None, reported: float) -> Hold | None:
        """What is left of it after a report on the model that was asked for at `reported`; None for nothing."""
        if not self.busy and model is not None and model.loading:
            # What was refused while the model loads is asked again when the model serves.
            return self
        if not self.busy or self.promised <= reported:
            return replace(self, until=self.since) if reported < self.since + _REMEMBERED_S else None
        # The time that a busy node names is an estimate: half of the work done, it is worth asking.
        free = model is not None and 2 * (model.queue_depth + model.in_flight) <= self.work
        return replace(self, until=self.since) if free and reported > self.since and not self.firm else self


@dataclass(eq=False, slots=True)
class Node:
    """One node: its last report (`models` are those in it), its breaker, and what this client has under way there.

    `probe_failures` counts probes that failed since the last good one; `checked_at` is when a probe last ended, and
    `stale` means that this is too long ago to rely on; `replied_at` is when it last answered a request;
    `returned_at` is when it came back after an absence, for slow start; `leased_at` is when it last got a request.
    `foreign` is the load of other clients by model, as of the last report. `names` are the ids and aliases that it
    lists: the node gets no requests for others. `breakers` and `silences` are those of single models that gave cause,
    `ejections` why they were ejected last; `key_refused_until` is when the API key may be tried again after a 401, and
    `key_refusal` what the node said.
    """

    url: str
    breaker: Breaker
    report: HealthReport | None = None
    models: dict[str, ModelReport] = field(default_factory=dict)
    trouble: str | None = None
    probed: bool = False
    probe_failures: int = 0
    checked_at: float = float("-inf")
    stale: bool = False
    replied_at: float = float("-inf")
    returned_at: float | None = None
    leased_at: float = float("-inf")
    outstanding: Counter[str] = field(default_factory=Counter)
    foreign: dict[str, int] = field(default_factory=dict)
    breakers: dict[str, Breaker] = field(default_factory=dict)
    silences: dict[str, Silence] = field(default_factory=dict)
    ejections: dict[str, str] = field(default_factory=dict)
    key_refused_until: float = float("-inf")
    key_refusal: str = ""
    holds: dict[tuple[str, str | None], Hold] = field(default_factory=dict)
    names: dict[str, ModelReport] = field(default_factory=dict)

    def resolve(self, name: str) -> ModelReport | None:
        """The model of that id or alias."""
        return self.names.get(plain_name(name))

    def half_open(self, model: str) -> bool:
        """Whether a request for the model would be a trial."""
        breaker = self.breakers.get(model)
        return not self.breaker.closed or (breaker is not None and not breaker.closed)

    def take_report(self, report: HealthReport) -> None:
        """Record a new report from a probe."""
        models = {model.id: model for model in report.models}
        for model in report.models:
            before = self.models.get(model.id)
            if model.serving and before is not None and not before.serving and model.id in self.breakers:
                # Its engine was restarted: evidence of recovery.
                self.breakers[model.id].shorten_quarantine()
        self.report = report
        self.models = models
        self.names = {plain_name(alias): model for model in report.models for alias in model.aliases}
        self.names |= {plain_name(model.id): model for model in report.models}
        self.foreign = {
            model.id: max(0, model.queue_depth + model.in_flight - self.outstanding[model.id])
            for model in report.models
        }
