"""The nodes of a client: which of them may get a request, which one does, and what each outcome teaches."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from backend_client.errors import (
    AttemptTimeout,
    BadReply,
    FleetOverloaded,
    ModelNotFound,
    NodeError,
    NodeNotServing,
    NodeOverloaded,
    NotOffered,
    NPUError,
    NPUUnavailableError,
    RequestRejected,
    SpaceChanged,
    VectorSpaceMismatch,
)
from backend_client.fleet.affinity import Affinity, conversation_key
from backend_client.fleet.node import Availability, BreakerState, Lease, Node, Pause
from backend_client.http.messages import HealthReport, ModelReport, Request, plain_name
from backend_client.lifetime import Clock
from backend_client.options import ClientOptions
from backend_client.results import FailureKind

log = logging.getLogger(__name__)

# How long a 429 or 503 without a Retry-After is taken to mean.
_DEFAULT_PAUSE_S = 1.0
# An attempt that ends, by its limit, its deadline or its caller, after the model answered nobody for so long is
# evidence of a hung engine; `silent_attempts` of them with no answer or token in between eject the model there. Others
# are not: a caller who allows less time than a request takes must not harm the node for those whom it answers
# meanwhile. The node's own watchdog reports the hang.
_SILENT_S = 1.0
# Timers are not exact.
_MOMENT_S = 0.001
# When to look whether the trial of an ejected node, or model, has ended.
_TRIAL_S = 0.1
# When to look whether a model is loaded, if its node gives no estimate.
_LOAD_S = 1.0
_NAMES_SHOWN = 10


@dataclass(slots=True)
class Pool:
    """Pure state of the fleet; it takes the results of probes and requests and never does I/O.

    `complete` is False while nodes are still being looked for the first time; `trouble` says why none was found.
    """

    options: ClientOptions
    clock: Clock
    rng: random.Random = field(default_factory=random.Random)
    nodes: dict[str, Node] = field(default_factory=dict)
    complete: bool = True
    trouble: str | None = None
    affinity: Affinity = field(default_factory=Affinity)
    _leases: dict[str, dict[Lease, None]] = field(default_factory=dict)

    def add(self, urls: Iterable[str]) -> list[Node]:
        """Add nodes; return those that are new."""
        new = []
        for url in urls:
            if url not in self.nodes:
                node = self.nodes[url] = Node(url, Availability(self.options.breaker, self.clock, self.rng))
                self._leases[url] = {}
                new.append(node)
        return new

    def remove(self, url: str) -> None:
        """Remove a node; requests that are under way there end as they will."""
        del self.nodes[url]
        del self._leases[url]

    @property
    def unseen(self) -> bool:
        """Whether some node's first probe has not ended yet, or discovery has not."""
        return not self.complete or any(not node.probed for node in self.nodes.values())

    def acquire(self, request: Request, tried: Collection[str] = ()) -> Lease:
        """Lend a node to a request, one outside of `tried` while there is any.

        A node that is loading the model is lent when no other can take the request: it waits there.

        Raises ModelNotFound, FleetOverloaded, VectorSpaceMismatch or NPUUnavailableError, with each node's reason.
        """
        now = self.clock()
        candidates = preferred(eligible(self.nodes, request, tried, now, self.trouble), request)
        # In a fleet of one node there is nothing to choose.
        conversation = conversation_key(request) if self.options.affinity and len(self.nodes) > 1 else None
        if conversation is None:
            node = choose(candidates, request, self.rng)
        else:
            node = self.affinity.choose(conversation, candidates, request, retry=bool(tried))
        found = node.names.get(plain_name(request.model)) if request.model else None
        model = found.id if found else request.model or ""
        available = node.of_models.get(model)
        if available is None:
            options = self.options.breaker.model_copy(update={"longest": self.options.breaker.longest_model})
            available = Availability(options, self.clock, self.rng)
            if found is not None:
                # Not for any name that a caller may think of.
                node.of_models[model] = available
        lease = Lease(
            node,
            request,
            model,
            available,
            node.availability.begin(),
            now,
            model_ticket=available.begin(),
            loading=found is not None and not found.loaded,
        )
        node.outstanding[lease.model] += 1
        self._leases[node.url][lease] = None
        return lease

    def settle(self, lease: Lease, error: BaseException | None) -> None:
        """A request ended: with an answer (None), with the node's refusal or failure, or given up (anything else)."""
        node = lease.node
        node.outstanding[lease.model] -= 1
        if node.outstanding[lease.model] <= 0:
            del node.outstanding[lease.model]
        self._leases.get(node.url, {}).pop(lease, None)
        if isinstance(error, NodeError) and error.failure is FailureKind.CONNECTION:
            lease.available.abandoned(lease.model_ticket)
            # Nothing but another request can show that such a node recovered, while its probes pass all the time.
            longest = None if node.probe_failures else self.options.breaker.longest_probed
            if node.availability.failed(lease.ticket, error.failure, error.what, longest):
                _log_ejection(f"node {node.url}", node.availability)
            return
        answered = error is None or isinstance(error, NodeError) or (isinstance(error, RequestRejected) and error.node)
        if lease.lost or isinstance(error, AttemptTimeout) or not answered:
            self._unanswered(lease, error)
            return
        self._learn_of_model(lease, error)
        node.replied_at = self.clock()
        was_open = not node.availability.closed
        node.availability.succeeded(lease.ticket)
        if was_open and node.availability.closed:
            log.info("node %s serves again", node.url)
        if isinstance(error, NodeNotServing | NodeOverloaded | SpaceChanged):
            self._note_pause(lease, error)

    def heard(self, lease: Lease) -> None:
        """Record a sign of life: the request's answer, or a token of it."""
        lease.available.silent = 0
        lease.available.heard_at = now = self.clock()
        if lease.waiting_since is not None:
            lease.waiting_since = now
        if lease.on_heard is not None:
            lease.on_heard()

    def _unanswered(self, lease: Lease, error: BaseException | None) -> None:
        """The request got no answer in its time, or was given up: a silent model is ejected, see `_SILENT_S`."""
        node, available = lease.node, lease.available
        # Since when this request waits, and nobody else's was answered either.
        began = self.clock() if lease.waiting_since is None else lease.waiting_since
        # A model may load for as long as it takes, and its node's probes say when the node is lost.
        silent = self.clock() - max(began, available.heard_at) >= _SILENT_S - _MOMENT_S
        if silent := silent and not (lease.lost or lease.loading):
            available.silent += 1
            if lease.model_ticket or available.silent >= self.options.breaker.silent_attempts:
                self._eject(lease, "it answers nothing")
                available.silent = 0
        if silent and isinstance(error, AttemptTimeout):
            node.availability.failed(lease.ticket, FailureKind.NONE, error.what)
        else:
            node.availability.abandoned(lease.ticket)
        available.abandoned(lease.model_ticket)

    def _note_pause(self, lease: Lease, error: NodeError) -> None:
        """Send the node no request for the model for as long as it asked, and at least for a first backoff."""
        node, now = lease.node, self.clock()
        pause = _DEFAULT_PAUSE_S if error.retry_after is None else max(error.retry_after, self.options.retry.pause)
        if isinstance(error, NodeOverloaded):
            # The request that ended here is not among them any more.
            work = node.outstanding[lease.model] + node.foreign.get(lease.model, 0)
            found = Pause(now + pause, busy=True, why="is busy", since=now, work=work)
        else:
            why = f"answered {error.code or error.status or 'in another vector space'}"
            found = Pause(now + pause, busy=False, why=why, since=now, passing=not isinstance(error, SpaceChanged))
        lease.available.pauses[lease.request.require_device] = found

    def _learn_of_model(self, lease: Lease, error: BaseException | None) -> None:
        """Only an answer of the engine closes its breaker; a refusal at the node's edge says nothing of it."""
        if error is None:
            self.heard(lease)
            lease.available.succeeded(lease.model_ticket)
        elif isinstance(error, BadReply) and error.contradicts:
            self._eject(lease, error.what)
        elif isinstance(error, NodeError) and error.failure is FailureKind.SERVER:
            if lease.available.failed(lease.model_ticket, error.failure, error.what):
                _log_ejection(f"{lease.model} on node {lease.node.url}", lease.available)
        else:
            lease.available.abandoned(lease.model_ticket)

    def _eject(self, lease: Lease, why: str) -> None:
        """Send the model no requests on this node for a while. Requests sent before its ejection tell nothing new."""
        if lease.available.closed or lease.model_ticket:
            lease.available.trip(why)
            _log_ejection(f"{lease.model} on node {lease.node.url}", lease.available)

    def probe_passed(self, node: Node, report: HealthReport, *, began: float) -> None:
        """A probe, begun then, brought a report (of a node that serves, or says that it does not)."""
        back = report.serving and not (node.report is not None and node.report.serving)
        recovered = node.probe_failures > 0
        self._probed(node)
        node.probe_failures = 0
        if node.availability.closed:
            # While it is ejected, the reason stays what ejected it.
            node.availability.reason = None
        if node.report is not None and node.report.status != report.status:
            log.info("node %s is %s", node.url, report.status)
        node.take_report(report)
        for model, available in node.of_models.items():
            left = {key: pause.after(node.models.get(model), began) for key, pause in available.pauses.items()}
            available.pauses = {key: pause for key, pause in left.items() if pause is not None}
        # A node that was started again first says that it does not serve yet.
        if (recovered or back) and report.serving:
            node.availability.shorten_quarantine()

    def probe_failed(self, node: Node, why: str, *, began: float, silent: bool) -> None:
        """A probe failed. A `silent` one (it timed out) does not count when the node has answered a request since
        `began`.
        """
        self._probed(node)
        if silent and node.replied_at >= began:
            return
        node.probe_failures += 1
        node.availability.reason = why
        if node.availability.state is BreakerState.HALF_OPEN or (
            node.availability.closed and node.probe_failures >= self.options.probe.failures
        ):
            node.availability.trip(why)
            _log_ejection(f"node {node.url}", node.availability)
            for lease in list(self._leases.get(node.url, ())):
                lease.lost = True
                if lease.on_lost is not None:
                    lease.on_lost()

    def _probed(self, node: Node) -> None:
        node.probed = True
        node.checked_at = self.clock()


def _log_ejection(what: str, availability: Availability) -> None:
    log.warning("%s is ejected for %.1f s: %s", what, availability.opens_in, availability.reason)


class RefusalReason(Enum):
    """Kinds of refusal; they decide which error the caller gets."""

    NOT_SERVING = auto()
    BUSY = auto()
    LACKS_MODEL = auto()
    OTHER_SPACE = auto()
    LOADING = auto()


@dataclass(frozen=True, slots=True)
class NodeRefusal:
    """Why a node cannot take a request now; `until` is the clock's time at which it may, where that is known."""

    node: str
    reason: RefusalReason
    why: str
    until: float | None = None


def refusal(node: Node, request: Request, now: float) -> NodeRefusal | None:
    """Why `node` may not get the request, or None."""
    model = None if request.model is None else node.names.get(plain_name(request.model))
    if request.model is not None and node.models and model is None:
        # Of a node that is down, too: nobody expects a model of it that its last report does not list.
        return NodeRefusal(node.url, RefusalReason.LACKS_MODEL, f"does not serve {request.model}")
    report = node.report
    if report is None:
        return NodeRefusal(node.url, RefusalReason.NOT_SERVING, node.availability.reason or "has not been probed yet")
    if not node.availability.closed and (node.probe_failures or not node.availability.admits()):
        why = f"ejected for {node.availability.opens_in:.1f} s more ({node.availability.reason or 'failures'})"
        # Its probes pass, so a trial is worth waiting for.
        until = None if node.probe_failures else now + max(node.availability.opens_in, _TRIAL_S)
        return NodeRefusal(node.url, RefusalReason.NOT_SERVING, why, until)
    if not (report.serving or report.loading):
        return NodeRefusal(node.url, RefusalReason.NOT_SERVING, _not_serving(report, request))
    # A node that hides its models refuses the API key: it is asked where no other node has the model, so that the
    # caller sees its 401.
    return _model_refusal(node, model, request, now) if report.lists_models else None


def _not_serving(report: HealthReport, request: Request) -> str:
    if not report.models:
        return "has no models"
    states = [f"{model.id} {model.state}" for model in report.models if request.model in {None, model.id}]
    return f"is {report.status}" + (f" ({', '.join(states)})" if states and report.status != "draining" else "")


def _model_refusal(node: Node, model: ModelReport | None, request: Request, now: float) -> NodeRefusal | None:
    if request.model is None:
        # A model that failed before its kind was known may be the one that is meant.
        if failed := [model.id for model in node.models.values() if not (model.kind or model.serving)]:
            return NodeRefusal(node.url, RefusalReason.NOT_SERVING, f"has {failed[0]} in the state failed")
        return NodeRefusal(node.url, RefusalReason.LACKS_MODEL, f"serves no {request.kind} model")
    if model is None:
        return NodeRefusal(node.url, RefusalReason.LACKS_MODEL, "lists no model")
    misfit = _misfit(model, request)
    if misfit is not None:
        return NodeRefusal(node.url, *misfit)
    paused = _pause(node, model, request, now)
    if paused is None and model.loading:
        # A request would wait there, so any other node goes first.
        return NodeRefusal(node.url, RefusalReason.LOADING, f"is loading {model.id}", _loaded_at(node, model, now))
    return paused


def _pause(node: Node, model: ModelReport, request: Request, now: float) -> NodeRefusal | None:
    """Why the node is to get no request for the model for a while, or None."""
    available = node.of_models.get(model.id)
    if available is None:
        return None
    if not (available.closed or available.admits()):
        why = f"has {model.id} ejected for {available.opens_in:.1f} s more ({available.reason})"
        return NodeRefusal(node.url, RefusalReason.NOT_SERVING, why, now + max(available.opens_in, _TRIAL_S))
    pause = available.pauses.get(request.require_device)
    if pause is None:
        return None
    until = pause.until
    if until <= now and model.loading and not pause.busy:
        # What it refused while it loads, however often it is asked, it takes once it has loaded.
        until = _loaded_at(node, model, now)
    if until <= now:
        return None
    reason = RefusalReason.BUSY if pause.busy else RefusalReason.NOT_SERVING
    return NodeRefusal(node.url, reason, f"{pause.why}, {until - now:.1f} s more", until if pause.passing else None)


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
        return RefusalReason.NOT_SERVING, f"does not run {model.id} on {request.require_device}"
    if request.space.name is not None and model.space != request.space.name and model.space is not None:
        return RefusalReason.OTHER_SPACE, f"answers for {model.id} in the vector space {model.space}"
    return None


def preferred(candidates: Sequence[Node], request: Request) -> Sequence[Node]:
    """The candidates (at least one) that are better than the others, whatever their load.

    Nodes that are known to serve the model go before those that might know the name, and nodes come last that refused a
    request lately when they had no more work than now, though the pause that they asked for is over.
    """
    if len(candidates) == 1:
        return candidates
    name = plain_name(request.model or "")
    sure = [node for node in candidates if node.names.get(name) is not None] or candidates
    # Prefer nodes that have the model in memory to those that would load it first.
    sure = [node for node in sure if (model := node.names.get(name)) is not None and model.loaded] or sure
    return [node for node in sure if not _looks_full(node, node.names.get(name), request)] or sure


def _looks_full(node: Node, model: ModelReport | None, request: Request) -> bool:
    """Whether the node has as much work for the model as when it refused a request lately."""
    available = node.of_models.get(model.id) if model is not None else None
    pause = available.pauses.get(request.require_device) if available is not None else None
    return pause is not None and node.work(model) >= pause.work


def choose(nodes: Sequence[Node], request: Request, rng: random.Random) -> Node:
    """One of the nodes (at least one): power of two choices on their load."""
    if len(nodes) == 1:
        return nodes[0]
    # Two different ones by their index, each equally likely; the first of them wins a tie.
    one = int(rng.random() * len(nodes))
    other = (one + 1 + int(rng.random() * (len(nodes) - 1))) % len(nodes)
    first, second = nodes[one], nodes[other]
    name = plain_name(request.model or "")
    return second if second.work(second.names.get(name)) < first.work(first.names.get(name)) else first


def eligible(
    nodes: Mapping[str, Node], request: Request, tried: Collection[str], now: float, trouble: str | None
) -> list[Node]:
    """The nodes to choose from, of all: those outside of `tried` if there are any. `trouble`: why no node was found.

    Raises the error that says why none can take the request, with each node's reason.
    """
    candidates: list[Node] = []
    refusals: list[NodeRefusal] = []
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


def explain(request: Request, refusals: Collection[NodeRefusal], now: float, nodes: Collection[Node]) -> NPUError:
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
