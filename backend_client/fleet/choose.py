"""Which nodes are eligible for a request, and which one is chosen. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from backend_client.errors import (
    FleetOverloaded,
    ModelNotFound,
    NotOffered,
    NPUError,
    NPUUnavailableError,
    VectorSpaceMismatch,
)
from backend_client.fleet.node import Node
from backend_client.http.health import HealthReport, ModelReport
from backend_client.http.messages import Request, plain_name


class RefusalReason(Enum):
    """Kinds of refusal; they decide which error the caller gets."""

    UNKNOWN = auto()
    DOWN = auto()
    NOT_SERVING = auto()
    BUSY = auto()
    LACKS_MODEL = auto()
    LACKS_DEVICE = auto()
    OTHER_SPACE = auto()
    LOADING = auto()


# When to look whether the trial of an ejected node, or model, has ended.
_TRIAL_S = 0.1
# When to look whether a model is loaded, if its node gives no estimate.
_LOAD_S = 1.0
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node cannot take a request now; `until` is the clock's time at which it may, where that is known."""

    node: str
    reason: RefusalReason
    why: str
    until: float | None = None


def refusal(node: Node, request: Request, now: float) -> Refusal | None:
    """Why `node` may not get the request, or None."""
    model = None if request.model is None else node.names.get(plain_name(request.model))
    if request.model is not None and node.models and model is None:
        # Of a node that is down, too: nobody expects a model of it that its last report does not list.
        return Refusal(node.url, RefusalReason.LACKS_MODEL, f"does not serve {request.model}")
    return _node_refusal(node, model, request, now)


def _node_refusal(node: Node, model: ModelReport | None, request: Request, now: float) -> Refusal | None:
    report = node.report
    if report is None:
        reason = RefusalReason.DOWN if node.probed else RefusalReason.UNKNOWN
        return Refusal(node.url, reason, node.trouble or "has not been probed yet")
    if not node.breaker.closed and (node.probe_failures or not node.breaker.admits()):
        why = f"ejected for {node.breaker.opens_in:.1f} s more ({node.trouble or 'failures'})"
        # Its probes pass, so a trial is worth waiting for.
        until = None if node.probe_failures else now + max(node.breaker.opens_in, _TRIAL_S)
        return Refusal(node.url, RefusalReason.DOWN, why, until)
    if not (report.serving or report.loading):
        return Refusal(node.url, RefusalReason.NOT_SERVING, _not_serving(report, request))
    # A node that hides its models refuses the API key: it is asked where no other node has the model, so that the
    # caller sees its 401.
    return _model_refusal(node, model, request, now) if report.lists_models else None


def _not_serving(report: HealthReport, request: Request) -> str:
    if not report.models:
        return "has no models"
    states = [f"{model.id} {model.state}" for model in report.models if request.model in {None, model.id}]
    return f"is {report.status}" + (f" ({', '.join(states)})" if states and report.status != "draining" else "")


def _model_refusal(node: Node, model: ModelReport | None, request: Request, now: float) -> Refusal | None:
    if request.model is None:
        # A model that failed before its kind was known may be the one that is meant.
        if failed := [model.id for model in node.models.values() if not (model.kind or model.serving)]:
            return Refusal(node.url, RefusalReason.NOT_SERVING, f"has {failed[0]} in the state failed")
        return Refusal(node.url, RefusalReason.LACKS_MODEL, f"serves no {request.kind} model")
    if model is None:
        return Refusal(node.url, RefusalReason.LACKS_MODEL, "lists no model")
    misfit = _misfit(model, request)
    if misfit is not None:
        return Refusal(node.url, *misfit)
    paused = _pause(node, model, request, now)
    if paused is None and model.loading:
        # A request would wait there, so any other node goes first.
        return Refusal(node.url, RefusalReason.LOADING, f"is loading {model.id}", _loaded_at(node, model, now))
    return paused


def _pause(node: Node, model: ModelReport, request: Request, now: float) -> Refusal | None:
    """Why the node is to get no request for the model for a while, or None."""
    breaker = node.breakers.get(model.id)
    if breaker is not None and not breaker.admits():
        why = f"has {model.id} ejected for {breaker.opens_in:.1f} s more ({node.ejections[model.id]})"
        return Refusal(node.url, RefusalReason.DOWN, why, now + max(breaker.opens_in, _TRIAL_S))
    hold = node.holds.get((model.id, request.require_device))
    if hold is None:
        return None
    until = hold.until
    if until <= now and model.loading and not hold.busy:
        # What it refused while it loads, however often it is asked, it takes once it has loaded.
        until = _loaded_at(node, model, now)
    if until <= now:
        return None
    reason = RefusalReason.BUSY if hold.busy else RefusalReason.NOT_SERVING
    return Refusal(node.url, reason, f"{hold.why}, {until - now:.1f} s more", until if hold.passing else None)


def _loaded_at(node: Node, model: ModelReport, now: float) -> float:
    """When a model that is loading is likely to be loaded, else when to look again."""
    expected = now if model.ready_in_s is None else node.checked_at + model.ready_in_s
    return expected if expected > now else now + _LOAD_S


def _misfit(model: ModelReport, request: Request) -> tuple[RefusalReason, str] | None:
    if model.kind != request.kind and not model.serves(request.kind):
        return RefusalReason.LACKS_MODEL, f"has {model.id} for {model.kind}, not {request.kind}"
    if not (model.serving or model.loading):
        return RefusalReason.NOT_SERVING, f"has {model.id} in the state {model.state}"
    if request.require_device is not None and request.require_device not in model.placements:
        return RefusalReason.LACKS_DEVICE, f"does not run {model.id} on {request.require_device}"
    if request.space.name is not None and model.space != request.space.name and model.space is not None:
        return RefusalReason.OTHER_SPACE, f"answers for {model.id} in the vector space {model.space}"
    return None


def work(node: Node, model: ModelReport | None) -> int:
    """The requests for the model that are under way there, ours and others'."""
    return 0 if model is None else node.outstanding[model.id] + node.foreign.get(model.id, 0)


def choose(candidates: Sequence[Node], request: Request, rng: random.Random) -> Node:
    """One of the candidates (at least one): power of two choices on their load.

    Nodes that are known to serve the model go before those that might know the name, and nodes come last that refused a
    request lately when they had no more work than now, though the pause that they asked for is over.
    """
    name = request.model or ""
    models = {node.url: node.names.get(plain_name(name)) for node in candidates}
    if len(candidates) == 1:
        return candidates[0]
    sure = [node for node in candidates if models[node.url] is not None] or candidates
    # Nobody waits for a model to load where another node has it in memory.
    sure = [node for node in sure if (model := models[node.url]) is not None and model.loaded] or sure
    sure = [node for node in sure if not _looks_full(node, models[node.url], request)] or sure
    # Two different ones by their index, each equally likely; the first of them wins a tie.
    one = int(rng.random() * len(sure))
    other = (one + 1 + int(rng.random() * (len(sure) - 1))) % len(sure)
    first, second = sure[one], sure[other]
    return second if work(second, models[second.url]) < work(first, models[first.url]) else first


def _looks_full(node: Node, model: ModelReport | None, request: Request) -> bool:
    """Whether the node has as much work for the model as when it refused a request lately."""
    hold = node.holds.get((model.id, request.require_device)) if model is not None else None
    return model is not None and hold is not None and work(node, model) >= hold.work


def eligible(
    nodes: Mapping[str, Node], request: Request, tried: Collection[str], now: float, trouble: str | None
) -> list[Node]:
    """The nodes to choose from, of all: those outside of `tried` if there are any. `trouble`: why no node was found.

    Raises the error that says why none can take the request, with each node's reason.
    """
    candidates: list[Node] = []
    refusals: list[Refusal] = []
    for node in nodes.values():
        reason = refusal(node, request, now)
        if reason is None:
            candidates.append(node)
        else:
            refusals.append(reason)
    fresh = [node for node in candidates if node.url not in tried] if tried else candidates
    if not nodes and trouble is not None:
        raise NPUUnavailableError(f"no node is known: {trouble}")
    if not (fresh or candidates):
        candidates = [nodes[item.node] for item in refusals if item.reason is RefusalReason.LOADING]
        fresh = [node for node in candidates if node.url not in tried]
    if not (fresh or candidates):
        raise explain(request, refusals, now, nodes.values())
    return fresh or candidates


def explain(request: Request, refusals: Collection[Refusal], now: float, nodes: Collection[Node]) -> NPUError:
    """The error for a request that no node can take, with every node's reason."""
    if not refusals:
        return NPUUnavailableError("no node is configured: set NPU_CLIENT_NODES")
    reasons = "; ".join(f"{item.node} {item.why}" for item in refusals)
    kinds = {item.reason for item in refusals}
    if kinds == {RefusalReason.LACKS_MODEL}:
        return _model_not_found(request, reasons, nodes)
    untils = [item.until for item in refusals if item.until is not None]
    retry_after = min(untils) - now if untils else None
    if RefusalReason.BUSY in kinds:
        return FleetOverloaded(f"every node that could serve it is busy: {reasons}", retry_after=retry_after)
    if RefusalReason.OTHER_SPACE in kinds:
        return VectorSpaceMismatch(f"no node answers in the vector space {request.space.name}: {reasons}")
    return NPUUnavailableError(f"no node can serve it: {reasons}", retry_after=retry_after)


def _model_not_found(request: Request, reasons: str, nodes: Collection[Node]) -> ModelNotFound:
    if request.model is None:
        return NotOffered(f"no node offers {request.kind}: {reasons}", code="model_not_found", status=404)
    reports = [model for node in nodes for model in node.models.values()]
    offered = sorted({model.id for model in reports if model.kind == request.kind or model.serves(request.kind)})
    known = ", ".join(offered[:_NAMES_SHOWN]) + (", …" if len(offered) > _NAMES_SHOWN else "")
    what = f"no node serves the model {request.model}: {reasons}; models for {request.kind}: {known or 'none'}"
    return ModelNotFound(what, code="model_not_found", status=404)
