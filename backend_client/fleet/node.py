"""What the client knows of one node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from backend_client.fleet.breaker import Breaker
from backend_client.fleet.report import HealthReport, ModelKind, ModelReport

# A node that is asked for more unknown names than this starts to forget them.
_ALIASES = 64


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a request asks of the node that serves it. `model` None: the node's default of that kind."""

    kind: ModelKind
    model: str | None = None
    device: str | None = None
    space: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """A node asked not to get requests for one model until then (`busy`: it is full; else it cannot serve)."""

    until: float
    busy: bool
    why: str


@dataclass(eq=False, slots=True)
class Node:
    """One node: its last report (`models` are those in it), its breaker, and what this client has under way there.

    `probe_failures` counts probes that failed since the last good one; `checked_at` is when a probe last ended, and
    `stale` means that this is too long ago to rely on; `replied_at` is when it last answered a
    request; `returned_at` is when it came back after an absence, for slow start. `foreign` is the load of other
    clients by model, as of the last report.
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
    outstanding: Counter[str] = field(default_factory=Counter)
    foreign: dict[str, int] = field(default_factory=dict)
    holds: dict[tuple[str, str | None], Hold] = field(default_factory=dict)
    aliases: dict[str, str | None] = field(default_factory=dict)

    def resolve(self, name: str) -> ModelReport | None:
        """The model of that id or known alias."""
        found = self.models.get(name)
        if found is None and (target := self.aliases.get(name)) is not None:
            found = self.models.get(target)
        return found

    def may_know(self, name: str) -> bool:
        """Whether the node might know the name as an alias: it was never asked."""
        return name not in self.aliases

    def learn(self, name: str, target: str | None) -> None:
        """`name` is another name of the model `target` here, or (None) of no model."""
        if len(self.aliases) >= _ALIASES:
            self.aliases.clear()
        self.aliases[name] = target

    def take_report(self, report: HealthReport) -> None:
        """A probe brought a new report."""
        models = {model.id: model for model in report.models}
        if models.keys() != self.models.keys():
            self.aliases.clear()
        self.report = report
        self.models = models
        self.foreign = {
            model.id: max(0, model.queue_depth + model.in_flight - self.outstanding[model.id])
            for model in report.models
        }
