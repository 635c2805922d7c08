"""Pool, breaker and budget together, against whatever hypothesis makes happen: no invariant breaks in 2,000 steps."""

import random
from asyncio import CancelledError

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from backend_client.errors import (
    ConnectionLost,
    NodeFailed,
    NodeNotServing,
    NodeOverloaded,
    NodeUnreachable,
    NPUUnavailableError,
    RequestRejected,
)
from backend_client.fleet.breaker import BreakerState
from backend_client.fleet.node import Requirement
from backend_client.fleet.pool import Pool
from backend_client.options import ClientOptions
from backend_client.routing.call import RetryBudget
from tests.unit.backend_client.fakes import EMBEDDER, report

URLS = [f"http://node-{index}:8081" for index in range(4)]
OPTIONS = ClientOptions()
ENDINGS = st.sampled_from(
    [
        lambda url: None,
        lambda url: ConnectionLost("reset", node=url),
        lambda url: NodeUnreachable("refused", node=url),
        lambda url: NodeFailed("boom", node=url, status=500),
        lambda url: NodeOverloaded("full", node=url, status=429, retry_after=2.0),
        lambda url: NodeNotServing("loading", node=url, status=503, code="model_loading", retry_after=1.0),
        lambda url: NodeNotServing("bye", node=url, status=503, code="draining"),
        lambda url: RequestRejected("no", node=url, status=400),
        lambda url: CancelledError(),
    ]
)


class Fleet(RuleBasedStateMachine):
    """The model keeps, in the plainest form, what each promise forbids."""

    leases = Bundle("leases")
    steps = 0

    def __init__(self):
        super().__init__()
        self.now = 100.0
        self.pool = Pool(OPTIONS, lambda: self.now, random.Random(7))
        self.pool.add(URLS)
        self.budget = RetryBudget(OPTIONS.retry, lambda: self.now)
        self.calls = self.retries = 0
        self.under_way = []
        self.connection_failures = dict.fromkeys(URLS, 0)
        self.busy_until = {}

    @rule(seconds=st.floats(0.001, 40))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(url=st.sampled_from(URLS), status=st.sampled_from(["ready", "degraded", "draining", "starting"]))
    def probe_passes(self, url, status):
        self.pool.probe_passed(self.pool.nodes[url], report(status, queue=3), began=self.now)

    @rule(url=st.sampled_from(URLS), silent=st.booleans())
    def probe_fails(self, url, silent):
        self.pool.probe_failed(self.pool.nodes[url], "no answer", began=self.now - 0.5, silent=silent)

    @rule(target=leases, tried=st.sets(st.sampled_from(URLS)))
    def acquire(self, tried):
        need = Requirement("embedding", EMBEDDER)
        before = {url: node.breaker.state for url, node in self.pool.nodes.items()}
        usable = {url for url in URLS if self.may_serve(url)}
        try:
            lease = self.pool.acquire(need, tried)
        except NPUUnavailableError:
            assert not usable
            return multiple()
        url = lease.node.url
        assert url in usable
        assert url not in tried or not usable - tried, "a node was asked again while another could serve"
        assert before[url] is not BreakerState.OPEN
        if before[url] is BreakerState.HALF_OPEN:
            assert lease.ticket
            assert not any(other.ticket == lease.ticket for other in self.under_way if other.node.url == url)
        self.under_way.append(lease)
        return lease

    def may_serve(self, url):
        node = self.pool.nodes[url]
        serving = node.report is not None and node.report.status != "draining"  # its models are always ready here
        hold = node.holds.get((EMBEDDER, None))
        return (
            serving
            and node.breaker.admits()
            and not (node.probe_failures and node.breaker.state is not BreakerState.CLOSED)
            and not (hold and hold.until > self.now)
        )

    @rule(lease=consumes(leases), ending=ENDINGS)
    def settle(self, lease, ending):
        node, url = lease.node, lease.node.url
        error = ending(url)
        closed = node.breaker.state is BreakerState.CLOSED
        self.pool.settle(lease, error)
        self.pool.settle(lease, error)  # a second time changes nothing
        self.under_way.remove(lease)
        if isinstance(error, NodeOverloaded):
            self.busy_until[url] = self.now + 2.0
            assert not closed or node.breaker.state is BreakerState.CLOSED
        if isinstance(error, RequestRejected | CancelledError):
            assert not closed or node.breaker.state is BreakerState.CLOSED

    @rule(retries=st.integers(0, 5))
    def call(self, retries):
        self.budget.deposit()
        self.calls += 1
        self.retries += sum(self.budget.withdraw() for _ in range(retries))

    @invariant()
    def counted(self):
        Fleet.steps += 1

    @invariant()
    def a_half_open_node_has_at_most_one_trial(self):
        for url, node in self.pool.nodes.items():
            if node.breaker.state is BreakerState.HALF_OPEN:
                current = [
                    lease
                    for lease in self.under_way
                    if lease.ticket and lease.node.url == url and lease.ticket == node.breaker._trial
                ]
                assert len(current) <= 1
                assert node.breaker.admits() == (not current)

    @invariant()
    def outstanding_is_what_is_under_way(self):
        for url, node in self.pool.nodes.items():
            assert node.outstanding.total() == sum(lease.node.url == url for lease in self.under_way)
            assert all(count > 0 for count in node.outstanding.values())

    @invariant()
    def quarantines_are_bounded(self):
        for node in self.pool.nodes.values():
            # Float: a time of opening less the time now is a little off.
            assert 0 <= node.breaker.opens_in <= 30.0 + 1e-6

    @invariant()
    def retries_are_bounded(self):
        options = OPTIONS.retry
        elapsed = self.now - 100.0
        assert self.retries <= options.initial + options.per_request * self.calls + options.per_second * elapsed + 1e-6
        assert 0 <= self.budget.balance <= options.saved


def test_no_invariant_breaks_in_two_thousand_steps(long):
    # Ten thousand with --long.
    Fleet.steps = 0
    run_state_machine_as_test(
        Fleet,
        settings=settings(
            max_examples=110 if long else 25,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    assert Fleet.steps >= (10_000 if long else 2_000)
