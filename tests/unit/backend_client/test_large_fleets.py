"""With many nodes a call looks at a few of them, and the laws of the choice hold all the same."""

import random
from collections import Counter
from unittest import mock

import pytest

from backend_client.errors import FleetOverloaded, NodeOverloaded, NodeUnreachable
from backend_client.fleet import choose, pool
from backend_client.fleet.node import Requirement
from backend_client.fleet.pool import Pool
from backend_client.http.health import HealthReport
from backend_client.options import ClientOptions
from tests.unit.backend_client.fakes import EMBEDDER, report
from tests.unit.backend_client.simulation.run import simulate

NEED = Requirement("embedding", EMBEDDER)


class Fleet:
    def __init__(self, count):
        self.now = 1000.0
        self.pool = Pool(ClientOptions(), lambda: self.now, random.Random(3))
        for node in self.pool.add([f"http://node-{index}" for index in range(count)]):
            self.pool.probe_passed(node, report(), began=self.now)
        self.nodes = list(self.pool.nodes.values())

    def call(self, error=None, tried=()):
        lease = self.pool.acquire(NEED, tried)
        self.pool.settle(lease, error)
        return lease.node

    def fail(self, node):
        """Requests to the node end with a connection failure until it is ejected."""
        while node.breaker.closed:
            others = {other.url for other in self.nodes if other is not node}
            lease = self.pool.acquire(NEED, others)
            assert lease.node is node
            self.pool.settle(lease, NodeUnreachable("gone", node=node.url))


@pytest.fixture
def fleet():
    return Fleet(300)


def test_a_call_looks_at_a_few_nodes_however_many_there_are(fleet):
    with (
        mock.patch.object(choose, "refusal", wraps=choose.refusal) as looks,
        mock.patch.object(pool, "eligible", side_effect=AssertionError("all were looked at")),
    ):
        for _ in range(500):
            fleet.call()
    assert looks.call_count <= 500 * 10


def test_all_nodes_get_their_share(fleet):
    share = Counter(fleet.call().url for _ in range(9_000))
    assert len(share) == 300
    assert 5 < min(share.values()) <= max(share.values()) < 60, "of 30 each"


def test_load_is_spread_as_by_two_choices_among_all(fleet):
    for _ in range(3000):
        fleet.pool.acquire(NEED)
    loads = [node.outstanding[EMBEDDER] for node in fleet.nodes]
    assert max(loads) <= 10 + 4, "one choice alone leaves some with twice the mean"


def test_an_ejected_node_gets_its_trial_as_soon_as_it_is_due(fleet):
    bad = fleet.nodes[7]
    fleet.fail(bad)
    assert all(fleet.call() is not bad for _ in range(300))
    fleet.now += bad.breaker.opens_in + 0.01
    assert fleet.call() is bad
    assert bad.breaker.closed


def test_a_node_that_starts_slowly_is_not_forgotten(fleet):
    slow = fleet.nodes[9]
    fleet.pool.probe_failed(slow, "gone", began=fleet.now, silent=False)
    fleet.pool.probe_passed(slow, report(status="draining"), began=fleet.now)
    fleet.pool.probe_passed(slow, report(), began=fleet.now)
    assert slow.returned_at == fleet.now
    fleet.now += 2.5
    assert fleet.call() is slow


def test_what_was_tried_is_not_tried_again_while_there_are_others(fleet):
    tried = {node.url for node in fleet.nodes[:290]}
    assert all(fleet.call(tried=tried).url not in tried for _ in range(200))


def test_a_model_that_few_nodes_have_is_found(fleet):
    for node in fleet.nodes[5:]:
        other = {"id": "other", "kind": "embedding", "state": "ready"}
        there = HealthReport.model_validate({"status": "ready", "models": [other]})
        fleet.pool.probe_passed(node, there, began=fleet.now)
    assert {fleet.call().url for _ in range(100)} == {node.url for node in fleet.nodes[:5]}


def test_a_fleet_that_is_full_says_so(fleet):
    urls = {node.url for node in fleet.nodes}
    for node in fleet.nodes:
        lease = fleet.pool.acquire(NEED, urls - {node.url})
        fleet.pool.settle(lease, NodeOverloaded("busy", node=node.url, status=429, retry_after=5.0))
    with pytest.raises(FleetOverloaded):
        fleet.pool.acquire(NEED)


def test_a_node_that_leaves_is_not_chosen(fleet):
    gone = {node.url for node in fleet.nodes[:250]}
    for url in gone:
        fleet.pool.remove(url)
    assert all(fleet.call().url not in gone for _ in range(200))


def test_no_invariant_is_violated_where_only_drawn_nodes_are_looked_at():
    with mock.patch.multiple(choose, SMALL_FLEET=2, _DRAWN=2):
        found = [f"seed {seed}: {each}" for seed in range(15) for each in simulate(seed).violations]
    assert not found
