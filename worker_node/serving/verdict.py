"""The decision for a request in the state that the placements are in now. Pure, so an explanation is the decision.

A request runs at once, waits for an engine that is loaded on demand or restarted, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from worker_node.domain import Device, RequestContext, Route
from worker_node.errors import DeviceUnavailable, EngineUnavailable, ModelLoading, NodeError
from worker_node.manager.placement import Placement
from worker_node.routing import NOTHING, Candidate, Decision, Feature, choose


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a request that routing must know.

    `prompt_tokens` is its longest prompt, `token_count` all of its tokens; the answer needs room for `min_new_tokens`.
    """

    model: str
    placements: Sequence[Placement]
    prompt_tokens: int
    token_count: int
    min_new_tokens: int = 0
    require: Device | None = None
    needs: frozenset[Feature] = NOTHING

    def decide(self, candidates: Sequence[Candidate]) -> Decision:
        """See `routing.choose`."""
        return choose(
            self.model,
            candidates,
            prompt_tokens=self.prompt_tokens,
            min_new_tokens=self.min_new_tokens,
            needs=self.needs,
            require=self.require,
        )

    def route(self, decision: Decision) -> Route:
        """The decision as replies report it."""
        placement = self.placements[decision.index]
        return Route(
            self.model,
            placement.device,
            decision.reason,
            self.token_count,
            placement.emulated,
            parts=placement.parts,
        )

    def suits(self, candidate: Candidate) -> bool:
        """Whether the placement could run it if its engine were up."""
        return self.require in {None, candidate.device} and candidate.suits(
            self.prompt_tokens, self.min_new_tokens, self.needs
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All placements of a demand at one moment: as routing sees them, and in how many seconds each may be ready.

    `on_demand`: requests wait for its load. `returning_in`: None unless it is being restarted.
    """

    candidates: Sequence[Candidate]
    on_demand: Sequence[bool] = field(repr=False)
    loaded_in: Sequence[float] = field(repr=False)
    returning_in: Sequence[float | None] = field(repr=False)

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> Snapshot:
        """The placements now. Every request asks for it, so a ready placement is not asked when it will be loaded."""
        candidates = [placement.candidate() for placement in placements]
        coming = [candidate.obstacle is not None for candidate in candidates]
        if True not in coming:
            return cls(candidates, coming, [0.0] * len(coming), [None] * len(coming))
        return cls(
            candidates,
            [waits and p.awaited for p, waits in zip(placements, coming, strict=True)],
            [p.expected_load_s() if waits else 0.0 for p, waits in zip(placements, coming, strict=True)],
            [p.returning_in() if waits else None for p, waits in zip(placements, coming, strict=True)],
        )


@dataclass(frozen=True, slots=True)
class RunsAt:
    """It runs at once."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """It waits for the engine of the placement at `index`, which is to be loaded (`loads`) or is being restarted."""

    index: int
    loads: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """It is refused; the engine of the placement at `loads` is loaded nevertheless, for requests with more time."""

    error: NodeError
    loads: int | None = None


Verdict = RunsAt | WaitsFor | Refused


def judge(demand: Demand, seen: Snapshot, context: RequestContext, now: float) -> Verdict:
    """Decide for a request at the monotonic time `now`."""
    try:
        return RunsAt(demand.decide(seen.candidates))
    except ModelLoading as error:
        index = _loadable(demand, seen, context)
        if index is not None:
            late = now + seen.loaded_in[index] > context.deadline
            return Refused(error, loads=index) if late else WaitsFor(index, loads=True)
        refusal: NodeError = error
    except (EngineUnavailable, DeviceUnavailable) as error:
        refusal = error
    except NodeError as error:
        return Refused(error)
    returning = min(_returning(demand, seen), default=None)
    if returning is None or now + returning[0] > context.restart_by(now):
        return Refused(refusal)
    return WaitsFor(returning[1], loads=False)


def foresee(demand: Demand, seen: Snapshot, verdict: Verdict) -> Route | None:
    """The route if the engine that is waited for becomes ready; None if the request is refused."""
    match verdict:
        case Refused():
            return None
        case RunsAt(decision):
            return demand.route(decision)
        case WaitsFor(index):
            ready = [replace(c, obstacle=None) if i == index else c for i, c in enumerate(seen.candidates)]
            return demand.route(demand.decide(ready))


def _loadable(demand: Demand, seen: Snapshot, context: RequestContext) -> int | None:
    """The first placement that suits the request, is not loaded yet and is waited for: see `wait_for_load`.

    One whose engine is being replaced is always waited for: it would serve if we had left it alone.
    """
    for index, candidate in enumerate(seen.candidates):
        waits = seen.on_demand[index] or context.wait_for_load
        if waits and candidate.obstacle == "model_loading" and demand.suits(candidate):
            return index
    return None


def _returning(demand: Demand, seen: Snapshot) -> Iterator[tuple[float, int]]:
    """Seconds and index of the placements that suit the request and are being restarted."""
    for index, (candidate, seconds) in enumerate(zip(seen.candidates, seen.returning_in, strict=True)):
        if seconds is not None and demand.suits(candidate):
            yield seconds, index
