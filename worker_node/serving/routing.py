"""Where a request runs, and why: the first placement, in the model's own order, that can serve it.

`decide_route` is pure: a request runs at once, waits for an engine that is being loaded or restarted, or is refused, by
the state that the placements are in. `select_placement` does what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Self, cast

from worker_node.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    InsufficientMemory,
    ModelLoading,
    NodeError,
    Overloaded,
    UnsupportedParameter,
)
from worker_node.core.types import NOTHING, Device, Feature, RequestContext, Route, RouteReason
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import Placement, first_change
from worker_node.manager.served import ServedModel

Obstacle = Literal["device_unavailable", "device_quarantined", "model_loading"]
_OBSTACLES: dict[EngineState, Obstacle] = {
    EngineState.UNLOADED: "model_loading",
    EngineState.STARTING: "model_loading",
    EngineState.BACKING_OFF: "device_unavailable",
    EngineState.QUARANTINED: "device_quarantined",
    EngineState.FAILED: "device_unavailable",
    EngineState.STOPPED: "device_unavailable",
}
# The request's parameter, what the placement says of it, and what to do.
_FEATURES: dict[Feature, tuple[str, str, str]] = {
    "n": ("n", "gives one answer at a time", "leave out n"),
    "logprobs": ("logprobs", "gives no log probabilities", "leave out logprobs and best_of"),
    "beam_search": (
        "use_beam_search",
        "has no beam search (a CPU or GPU has, for a model with enable_prefix_caching = false and no prompt_lookup)",
        "leave out use_beam_search",
    ),
    "language_detection": ("language", "does not detect the language of speech", "set language"),
    "word_timestamps": (
        "timestamp_granularities[]",
        "gives no times of words",
        "leave out word, set word_timestamps = true for the model",
    ),
}
# Between requests for a model whose cold compile for an NPU takes an unknown time.
_COLD_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """One placement at one time.

    `prompt_limit` bounds the prompt and `total_limit` prompt and output together, both in tokens; `lacks` is what it
    can never do. `obstacle` says why it cannot serve now, `detail` in words; None means that it can. Otherwise it is
    likely to be ready in `ready_in` seconds (inf: unknown; None: not soon, or not by itself), `on_request`: because a
    request has or would have it loaded. `shortage` says why its load waits for memory or was refused.
    """

    device: Device
    prompt_limit: int
    total_limit: int
    obstacle: Obstacle | None = None
    detail: str | None = None
    retry_after: float | None = None
    lacks: frozenset[Feature] = NOTHING
    ready_in: float | None = None
    on_request: bool = False
    shortage: str | None = None

    @classmethod
    def of(cls, placement: Placement) -> PlacementStatus:
        if placement.engine.ready:
            return cls(placement.device, placement.prompt_limit, placement.total_limit, lacks=placement.lacks)
        status, ready_in = placement.engine.status, placement.ready_in()
        # A process that grew too large would serve if it had been left alone.
        on_request = status.replacing or placement.state is EngineState.UNLOADED
        if placement.request is not None:
            on_request = on_request or placement.request.on_request
        retry_after = status.retry_after if ready_in is None else ready_in
        return cls(
            placement.device,
            placement.prompt_limit,
            placement.total_limit,
            obstacle=_OBSTACLES.get(placement.state),
            detail=placement.reason,
            retry_after=_COLD_RETRY_S if retry_after == math.inf else retry_after,
            lacks=placement.lacks,
            ready_in=ready_in,
            on_request=on_request,
            shortage=placement.shortage,
        )

    def holds(self, demand: Demand) -> bool:
        total = demand.prompt_tokens + demand.min_new_tokens
        return demand.prompt_tokens <= self.prompt_limit and total <= self.total_limit


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a request that routing must know.

    `prompt_tokens` is its longest prompt, `token_count` all of its tokens; the answer needs room for `min_new_tokens`.
    The length of the answer does not count: it ends at the limit of the placement's window.
    """

    model: str
    placements: Sequence[Placement]
    prompt_tokens: int
    token_count: int
    min_new_tokens: int = 0
    require: Device | None = None
    needs: frozenset[Feature] = NOTHING

    @classmethod
    def of_rows(cls, model: ServedModel, rows: Sequence[Sequence[int]], context: RequestContext) -> Self:
        lengths = [len(row) for row in rows]
        longest, total = max(lengths, default=0), sum(lengths)
        return cls(model.installed.id, model.placements, longest, total, require=context.require_device)

    def suits(self, status: PlacementStatus) -> bool:
        return self.require in {None, status.device} and not status.lacks & self.needs and status.holds(self)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a request: a placement by its `index`, with the `reason` for it, or an `error`.

    With `wait_until` the request waits until then for the placement at `index`. The placement at `load` is to be loaded
    in any case: the request prefers it, or later ones with more time do.
    """

    index: int = -1
    reason: RouteReason = "preferred"
    error: NodeError | None = None
    wait_until: float | None = None
    load: int | None = None

    def route(self, demand: Demand) -> Route:
        placement = demand.placements[self.index]
        return Route(
            demand.model,
            placement.device,
            self.reason,
            demand.token_count,
            placement.emulated,
            parts=placement.parts,
            faults=len(placement.faults),
        )


def decide_route(
    demand: Demand,
    considered: Sequence[PlacementStatus],
    context: RequestContext,
    *,
    began: float,
    now: float,
    first: int = 0,
) -> Decision:
    """Decide at the monotonic time `now` for a request that has waited since `began`.

    A ready placement is used at once. If none is ready, the request waits for the first placement that is likely to be
    ready before the request must run. A request that already waits for the placement at index `first` considers only
    that one and later ones, so a request does not alternate between two loading placements.
    """
    decision = choose(demand, considered)
    if decision.error is None or not isinstance(decision.error, (ModelLoading, EngineUnavailable, DeviceUnavailable)):
        return decision
    load: int | None = None
    error: NodeError = decision.error
    for index, status in enumerate(considered):
        if index < first or status.ready_in is None or not demand.suits(status):
            continue
        if load is None and status.obstacle == "model_loading":
            load = index
        if status.shortage is None:
            until = context.deadline if status.on_request else context.restart_by(began)
            in_time = now + status.ready_in <= until
        else:
            # When others become idle is unknown: it waits as long as the load could still end in time.
            until = min(context.restart_by(began), context.deadline - status.ready_in)
            in_time = now < until
            if not in_time:
                error = InsufficientMemory(status.shortage)
        if in_time:
            return Decision(index, wait_until=until, load=load)
    return Decision(error=error, load=load)


def choose(demand: Demand, considered: Sequence[PlacementStatus]) -> Decision:
    """Choose the first placement that can serve now. The decision's reason says why the preferred one was skipped.

    The decision's error is UnsupportedParameter if no placement supports what the request needs, ContextLengthExceeded
    if the prompt fits none of those that do, DeviceUnavailable if the required device cannot serve, and ModelLoading or
    EngineUnavailable (with `retry_after`) if the suitable placements are not ready.
    """
    allowed = [(i, status) for i, status in enumerate(considered) if demand.require in {None, status.device}]
    if not allowed:
        absent = f"{demand.model} has no placement on {demand.require} on this node"
        return Decision(error=DeviceUnavailable(absent, param="model"))
    skipped: RouteReason | None = None
    blocked: PlacementStatus | None = None
    for index, status in allowed:
        if status.lacks & demand.needs:
            reason: str = f"unsupported_on_{status.device.lower()}"
        elif not status.holds(demand):
            reason = f"context_exceeds_{status.device.lower()}"
        elif status.obstacle is None:
            return Decision(index, "device_required" if demand.require else skipped or "preferred")
        else:
            reason = status.obstacle
            # Of those that cannot serve, the one that is being loaded will soonest.
            if blocked is None or (reason == "model_loading" and blocked.obstacle != "model_loading"):
                blocked = status
        skipped = skipped or cast("RouteReason", reason)
    return Decision(error=_refusal(demand, [status for _, status in allowed], blocked))


def _refusal(demand: Demand, allowed: Sequence[PlacementStatus], blocked: PlacementStatus | None) -> NodeError:
    if blocked is not None:
        detail = f"{demand.model} on {blocked.device}: {blocked.detail or blocked.obstacle}"
        retry_after = blocked.retry_after
        error: NodeError = EngineUnavailable(f"{detail}; try again or use another node", retry_after=retry_after)
        if blocked.obstacle == "model_loading":
            error = ModelLoading(f"{detail}; it is being loaded, try again later", retry_after=retry_after)
        elif demand.require is not None:
            error = DeviceUnavailable(f"{detail}; the request requires {demand.require}", retry_after=retry_after)
        error.model, error.device = demand.model, blocked.device.value
        return error
    able = [status for status in allowed if not status.lacks & demand.needs]
    if not able:
        param, says, remedy = _FEATURES[min(allowed[0].lacks & demand.needs)]
        return UnsupportedParameter(
            f"{demand.model} on {allowed[0].device} {says}; {remedy} or use another placement", param=param
        )
    widest = max(able, key=lambda status: status.total_limit)
    room = f" and needs room for {demand.min_new_tokens} more" if demand.min_new_tokens else ""
    return ContextLengthExceeded(
        f"the prompt has {demand.prompt_tokens} tokens{room}; {demand.model} on {widest.device} takes at most "
        f"{widest.prompt_limit} in the prompt and {widest.total_limit} in all",
        param="prompt",
        tokens=demand.prompt_tokens,
        limit=min(widest.prompt_limit, widest.total_limit - demand.min_new_tokens),
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The placement that a request runs on; it waited `loading_s` seconds for the engine to be loaded or restarted."""

    placement: Placement
    route: Route
    loading_s: float = 0.0


async def select_placement(demand: Demand, context: RequestContext, *, units: int = 1) -> Selection:
    """Return the placement for a request that takes `units` places at admission (see `AdmissionLimits`).

    If no placement is ready, it has one loaded and waits for the first that is likely to be ready in time; meanwhile
    the request takes places in the queue. Raises the errors of `choose`; ModelLoading also when the load is
    likely to outlast the deadline; InsufficientMemory; DeadlineExceeded; Overloaded when too many wait.
    """
    decision, waited_s = await wait_for_placement(demand, context, PlacementStatus.of, units=units)
    if decision.error is not None:
        request_load(demand, decision.load)
        raise decision.error
    return Selection(demand.placements[decision.index], decision.route(demand), waited_s)


async def wait_for_placement(
    demand: Demand, context: RequestContext, status_of: Callable[[Placement], PlacementStatus], *, units: int
) -> tuple[Decision, float]:
    """Wait until the decision is a placement that can serve, or an error; return it, and the seconds that it took.

    Meanwhile the request takes `units` places in the queue; 0 for a request that was admitted already. Raises
    Overloaded, InsufficientMemory for a load that was refused, DeadlineExceeded.
    """
    clock = demand.placements[0].clock
    began, waited_s = clock(), 0.0

    def decide_now(first: int) -> Decision:
        considered = [status_of(placement) for placement in demand.placements]
        return decide_route(demand, considered, context, began=began, now=clock(), first=first)

    decision = decide_now(0)
    while decision.wait_until is not None:
        index = decision.index
        placement = demand.placements[index]
        queued = placement.admission.waiting(units, interactive=context.interactive) if units else nullcontext()
        with queued, placement.awaited():
            # Only once: where memory does not hold it beside the other one, each further try would be refused, too.
            request_load(demand, decision.load)
            while decision.wait_until is not None and decision.index == index:
                request_load(demand, index)
                until = decision.wait_until
                if not await first_change(demand.placements, until) and until == context.deadline:
                    raise DeadlineExceeded("the deadline passed before the model was ready")
                placement.raise_refusal()
                decision = decide_now(index)
        waited_s = clock() - began
    return decision, waited_s


def request_load(demand: Demand, index: int | None) -> None:
    if index is not None and demand.placements[index].state is EngineState.UNLOADED:
        demand.placements[index].request_load(on_request=True, insist=False)


def reject_if_full(placements: Sequence[Placement], units: int, context: RequestContext) -> None:
    """Raise Overloaded if every placement would refuse. Called before tokenizing, so that a refusal costs little."""
    refusal: Overloaded | None = None
    for placement in placements:
        try:
            placement.admission.check(units, context.deadline, interactive=context.interactive)
        except Overloaded as error:
            refusal = refusal or error
        else:
            return
    if refusal is not None:
        raise refusal
