"""What a client knows of one node: its report, its breakers, the work in flight, and the lease of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from backend_client.fleet.breaker import Breaker
from backend_client.http.health import HealthReport, ModelReport
from backend_client.http.messages import Request, plain_name

# How long a refusal is remembered: until the next probe, that is less than the 5 s in which a node serves again.
_REMEMBERED_S = 3.0


@dataclass(frozen=True, slots=True)
class Hold:
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

    def after(self, model: ModelReport | None, reported: float) -> Hold | None:
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


@dataclass(eq=False, slots=True)
class Node:
    """One node: its last report (`models` are those in it), its breaker, and what this client has under way there.

    `probe_failures` counts probes that failed since the last good one; `checked_at` is when a probe last ended;
    `replied_at` is when it last answered a request.
    `foreign` is the load of other clients by model, as of the last report. `names` are the ids and aliases that it
    lists: the node gets no requests for others. `breakers` are those of single models that gave cause, `ejections` why
    they were ejected last, and `silent` counts the attempts in a row that got no answer. `heard_at` is when each model
    last gave a sign of life, to any request.
    """

    url: str
    breaker: Breaker
    report: HealthReport | None = None
    models: dict[str, ModelReport] = field(default_factory=dict)
    trouble: str | None = None
    probed: bool = False
    probe_failures: int = 0
    checked_at: float = float("-inf")
    replied_at: float = float("-inf")
    outstanding: Counter[str] = field(default_factory=Counter)
    foreign: dict[str, int] = field(default_factory=dict)
    breakers: dict[str, Breaker] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)
    heard_at: dict[str, float] = field(default_factory=dict)
    ejections: dict[str, str] = field(default_factory=dict)
    holds: dict[tuple[str, str | None], Hold] = field(default_factory=dict)
    names: dict[str, ModelReport] = field(default_factory=dict)

    def resolve(self, name: str) -> ModelReport | None:
        return self.names.get(plain_name(name))

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

    `ticket` and `model_ticket` are those of the breakers. `loading`: the model was not in memory. `waiting_since`: the
    client waits for the next sign of life since then; None while the caller reads.
    """

    node: Node
    request: Request
    model: str
    ticket: int
    began: float
    model_ticket: int = 0
    loading: bool = False
    lost: bool = False
    waiting_since: float | None = None
    on_lost: Callable[[], None] | None = None
    on_heard: Callable[[], None] | None = None
