"""The decision for a request in the state that the placements are in now. Pure, so an explanation is the decision.

A request runs at once, waits for an engine that is being loaded or restarted, or is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker_node.core.errors import DeviceUnavailable, EngineUnavailable, InsufficientMemory, ModelLoading, NodeError
from worker_node.core.types import Device, RequestContext, Route
from worker_node.manager.placement import Placement
from worker_node.scheduling.routing import NOTHING, Candidate, Decision, Feature, choose


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
class WaitsFor:
    """A request waits for the placement at `index` until `until`; the one at `loads`, which it prefers, is loaded."""

    index: int
    until: float
    loads: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is refused; the placement at `loads` is loaded nevertheless, for requests with more time."""

    error: NodeError
    loads: int | None = None


Verdict = Decision | WaitsFor | Refused


def judge(
    demand: Demand,
    candidates: Sequence[Candidate],
    context: RequestContext,
    *,
    began: float,
    now: float,
    first: int = 0,
) -> Verdict:
    """Decide at the monotonic time `now` for a request that has waited since `began`.

    Where no placement is ready, it waits for the first that is likely to be in time, however that comes to be ready.
    One that waits for that at `first` does not go back to an earlier one until that is ready.
    """
    try:
        return demand.decide(candidates)
    except (ModelLoading, EngineUnavailable, DeviceUnavailable) as error:
        refusal: NodeError = error
    except NodeError as error:
        return Refused(error)
    loads: int | None = None
    for index, candidate in enumerate(candidates):
        if index < first or candidate.ready_in is None or not demand.suits(candidate):
            continue
        if loads is None and candidate.obstacle == "model_loading":
            loads = index
        if candidate.shortage is None:
            until = context.deadline if candidate.on_request else context.restart_by(began)
            if now + candidate.ready_in <= until:
                return WaitsFor(index, until, loads)
        else:
            # Others become idle nobody knows when: it waits as long as the load could still end in time.
            until = min(context.restart_by(began), context.deadline - candidate.ready_in)
            if now < until:
                return WaitsFor(index, until, loads)
            refusal = InsufficientMemory(candidate.shortage)
    return Refused(refusal, loads)
