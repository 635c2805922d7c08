"""The nodes of a client: leases one to each request, and learns from the request's outcome."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from backend_client.errors import (
    AttemptTimeout,
    BadReply,
    NodeError,
    NodeNotServing,
    NodeOverloaded,
    RequestRejected,
    SpaceChanged,
)
from backend_client.fleet.breaker import Breaker, BreakerState
from backend_client.fleet.choose import choose, eligible
from backend_client.fleet.node import Hold, Lease, Node
from backend_client.http.health import HealthReport
from backend_client.http.messages import Request, plain_name
from backend_client.lifetime import Clock
from backend_client.options import ClientOptions
from backend_client.results import FailureKind

log = logging.getLogger(__name__)

# How long a 429 or 503 without a Retry-After is taken to mean.
_DEFAULT_HOLD_S = 1.0
# An attempt that ends, by its limit, its deadline or its caller, after the model answered nobody for so long is
# evidence of a hung engine; `silent_attempts` of them with no answer or token in between eject the model there. Others
# are not: a caller who allows less time than a request takes must not harm the node for those whom it answers
# meanwhile. The node's own watchdog reports the hang.
_SILENT_S = 1.0
# Timers are not exact.
_MOMENT_S = 0.001


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
    _leases: dict[str, dict[Lease, None]] = field(default_factory=dict)

    def add(self, urls: Iterable[str]) -> list[Node]:
        """Add nodes; return those that are new."""
        new = []
        for url in urls:
            if url not in self.nodes:
                node = self.nodes[url] = Node(url, Breaker(self.options.breaker, self.clock, self.rng))
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
        candidates = eligible(self.nodes, request, tried, now, self.trouble)
        node = choose(candidates, request, self.rng)
        found = node.names.get(plain_name(request.model)) if request.model else None
        model = found.id if found else request.model or ""
        breaker = node.breakers.get(model)
        lease = Lease(
            node,
            request,
            model,
            0 if node.breaker.closed else node.breaker.begin(),
            now,
            model_ticket=breaker.begin() if breaker else 0,
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
            self._abandon(lease)
            # Nothing but another request can show that such a node recovered, while its probes pass all the time.
            longest = None if node.probe_failures else self.options.breaker.longest_probed
            if node.breaker.failed(lease.ticket, error.failure, longest):
                self._left(node, error.what)
            return
        answered = error is None or isinstance(error, NodeError) or (isinstance(error, RequestRejected) and error.node)
        if lease.lost or isinstance(error, AttemptTimeout) or not answered:
            self._unanswered(lease, error)
        else:
            self._answered(lease, error)

    def heard(self, lease: Lease) -> None:
        """Record a sign of life: the request's answer, or a token of it."""
        lease.node.silent.pop(lease.model, None)
        lease.node.heard_at[lease.model] = self.clock()
        if lease.waiting_since is not None:
            lease.waiting_since = self.clock()
        if lease.on_heard is not None:
            lease.on_heard()

    def _unanswered(self, lease: Lease, error: BaseException | None) -> None:
        """The request got no answer in its time, or was given up: a silent model is ejected, see `_SILENT_S`."""
        node = lease.node
        # Since when this request waits, and nobody else's was answered either.
        began = self.clock() if lease.waiting_since is None else lease.waiting_since
        since = max(began, node.heard_at.get(lease.model, began))
        # A model may load for as long as it takes, and its node's probes say when the node is lost.
        silent = self.clock() - since >= _SILENT_S - _MOMENT_S and not (lease.lost or lease.loading)
        if silent:
            node.silent[lease.model] += 1
            if lease.model_ticket or node.silent[lease.model] >= self.options.breaker.silent_attempts:
                self._eject(lease, "it answers nothing")
                del node.silent[lease.model]
        if silent and isinstance(error, AttemptTimeout):
            node.breaker.failed(lease.ticket, FailureKind.NONE)
        else:
            node.breaker.abandoned(lease.ticket)
        self._abandon(lease)

    def _answered(self, lease: Lease, error: BaseException | None) -> None:
        node = lease.node
        now = self.clock()
        self._learn_of_model(lease, error)
        was_open = not node.breaker.closed
        node.breaker.succeeded(lease.ticket)
        node.replied_at = now
        if was_open and node.breaker.closed:
            log.info("node %s serves again", node.url)
        if isinstance(error, NodeNotServing | NodeOverloaded | SpaceChanged):
            self._hold(lease, error)

    def _hold(self, lease: Lease, error: NodeError) -> None:
        """Send the node no request for the model for as long as it asked, and at least for a first backoff."""
        node, now = lease.node, self.clock()
        pause = _DEFAULT_HOLD_S if error.retry_after is None else max(error.retry_after, self.options.retry.pause)
        if isinstance(error, NodeOverloaded):
            # The request that ended here is not among them any more.
            work = node.outstanding[lease.model] + node.foreign.get(lease.model, 0)
            hold = Hold(now + pause, busy=True, why="is busy", since=now, work=work)
        else:
            why = f"answered {error.code or error.status or 'in another vector space'}"
            hold = Hold(now + pause, busy=False, why=why, since=now, passing=not isinstance(error, SpaceChanged))
        node.holds[lease.model, lease.request.require_device] = hold

    def _learn_of_model(self, lease: Lease, error: BaseException | None) -> None:
        """Only an answer of the engine closes its breaker; a refusal at the node's edge says nothing of it."""
        if error is None:
            self.heard(lease)
            if (breaker := lease.node.breakers.get(lease.model)) is not None:
                breaker.succeeded(lease.model_ticket)
        elif isinstance(error, BadReply) and error.contradicts:
            self._eject(lease, error.what)
        elif isinstance(error, NodeError) and error.failure is FailureKind.SERVER:
            self._engine_failed(lease, error)
        else:
            self._abandon(lease)

    # The breakers of single models on a node: made at the model's first failure. One model is ejected while the node's
    # others serve.

    def _abandon(self, lease: Lease) -> None:
        """The request shows nothing about the model."""
        if (breaker := lease.node.breakers.get(lease.model)) is not None:
            breaker.abandoned(lease.model_ticket)

    def _eject(self, lease: Lease, why: str) -> None:
        """Send the model no requests on this node for a while. Requests sent before its ejection tell nothing new."""
        breaker = self._model_breaker(lease)
        if breaker.closed or lease.model_ticket:
            breaker.trip()
            self._ejected(lease, breaker, why)

    def _engine_failed(self, lease: Lease, error: NodeError) -> None:
        breaker = self._model_breaker(lease)
        if breaker.failed(lease.model_ticket, error.failure):
            self._ejected(lease, breaker, error.what)

    def _ejected(self, lease: Lease, breaker: Breaker, why: str) -> None:
        lease.node.ejections[lease.model] = why
        log.warning("%s on node %s is ejected for %.1f s: %s", lease.model, lease.node.url, breaker.opens_in, why)

    def _model_breaker(self, lease: Lease) -> Breaker:
        breaker = lease.node.breakers.get(lease.model)
        if breaker is None:
            options = self.options.breaker.model_copy(update={"longest": self.options.breaker.longest_model})
            breaker = lease.node.breakers[lease.model] = Breaker(options, self.clock, self.rng)
        return breaker

    def probe_passed(self, node: Node, report: HealthReport, *, began: float) -> None:
        """A probe, begun then, brought a report (of a node that serves, or says that it does not)."""
        back = report.serving and not (node.report is not None and node.report.serving)
        recovered = node.probe_failures > 0
        self._probed(node)
        node.probe_failures = 0
        node.trouble = None
        if node.report is not None and node.report.status != report.status:
            log.info("node %s is %s", node.url, report.status)
        node.take_report(report)
        left = {key: hold.after(node.models.get(key[0]), began) for key, hold in node.holds.items()}
        node.holds = {key: hold for key, hold in left.items() if hold is not None}
        # A node that was started again first says that it does not serve yet.
        if (recovered or back) and report.serving:
            node.breaker.shorten_quarantine()

    def probe_failed(self, node: Node, why: str, *, began: float, silent: bool) -> None:
        """A probe failed. A `silent` one (it timed out) does not count when the node has answered a request since
        `began`.
        """
        self._probed(node)
        if silent and node.replied_at >= began:
            return
        node.probe_failures += 1
        node.trouble = why
        if node.breaker.state is BreakerState.HALF_OPEN or (
            node.breaker.closed and node.probe_failures >= self.options.probe.failures
        ):
            node.breaker.trip()
            self._left(node, why)
            for lease in list(self._leases.get(node.url, ())):
                lease.lost = True
                if lease.on_lost is not None:
                    lease.on_lost()

    def _probed(self, node: Node) -> None:
        node.probed = True
        node.checked_at = self.clock()

    def _left(self, node: Node, why: str) -> None:
        node.trouble = why
        log.warning("node %s is ejected for %.1f s: %s", node.url, node.breaker.opens_in, why)
