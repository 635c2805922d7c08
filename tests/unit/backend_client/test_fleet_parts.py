"""The breaker, and which of several nodes is chosen."""

import random
from collections import Counter

import pytest

from backend_client.client import NodeStatus
from backend_client.fleet.node import Availability, BreakerState, Node
from backend_client.fleet.pool import Pool, choose
from backend_client.http.messages import Request
from backend_client.lifetime import Deadline
from backend_client.options import BreakerOptions, ClientOptions
from backend_client.results import FailureKind
from tests.unit.backend_client.fakes import EMBEDDER, report


class Clock:
    """Time that is set by hand."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Availability(BreakerOptions(), clock, random.Random(3))


def fail(breaker, harm=FailureKind.CONNECTION):
    return breaker.failed(breaker.begin(), harm, "it failed")


@pytest.mark.parametrize(("harm", "times"), [(FailureKind.CONNECTION, 2), (FailureKind.SERVER, 5)])
def test_it_opens_after_failures_in_a_row(breaker, harm, times):
    for _ in range(times - 1):
        assert not fail(breaker, harm)
    breaker.succeeded(breaker.begin())
    for _ in range(times - 1):
        assert not fail(breaker, harm)
    assert breaker.admits()
    assert fail(breaker, harm)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "it failed")
    assert not breaker.admits()


def test_an_ejected_node_says_why_although_its_probes_pass(clock):
    pool = Pool(ClientOptions(), clock, random.Random(3))
    (node,) = pool.add(["http://node:1"])
    pool.probe_passed(node, report(), began=clock())
    fail(node.availability)
    fail(node.availability)
    pool.probe_passed(node, report(), began=clock())
    status = NodeStatus.of(node)
    assert (status.status, status.usable, status.trouble) == ("ready", False, "it failed")
    clock.now += 60
    node.availability.succeeded(node.availability.begin())
    pool.probe_passed(node, report(), began=clock())
    assert (NodeStatus.of(node).usable, NodeStatus.of(node).trouble) == (True, None)


def test_a_trial_that_was_given_up_leaves_room_for_another(breaker, clock):
    fail(breaker)
    fail(breaker)
    clock.now += 1.2
    breaker.abandoned(breaker.begin())
    assert breaker.admits()


def test_good_service_is_forgotten_bad(breaker, clock):
    for _ in range(4):
        breaker.trip("it failed")
    clock.now += 30
    breaker.succeeded(breaker.begin())
    clock.now += 30
    breaker.trip("it failed")
    assert breaker.opens_in <= 1.2


def test_a_node_that_is_dead_for_weeks_is_tried_now_and_then(breaker):
    for _ in range(2000):
        breaker.trip("it failed")
    assert 0 < breaker.opens_in <= BreakerOptions().longest


def node(url, *, queue=0, outstanding=0):
    made = Node(url, Availability(BreakerOptions(), lambda: 100.0, random.Random(1)))
    made.take_report(report(queue=queue))
    made.outstanding[EMBEDDER] = outstanding
    return made


def chosen(nodes, times=1000):
    rng = random.Random(5)
    need = Request(path="/embeddings", kind="embedding", model=EMBEDDER, deadline=Deadline.after(1))
    return Counter(choose(nodes, need, rng).url for _ in range(times))


def test_the_less_loaded_of_two_is_chosen():
    assert chosen([node("a", queue=3), node("b", outstanding=2)]) == {"b": 1000}
    assert chosen([node("a", queue=1), node("b", outstanding=2)]) == {"a": 1000}


def test_equals_share_alike_and_the_most_loaded_of_three_gets_nothing():
    share = chosen([node("a"), node("b"), node("c", queue=9)])
    assert share["c"] == 0
    assert 400 < share["a"] < 600


def test_our_own_requests_are_not_counted_twice():
    made = node("a", outstanding=3)
    made.take_report(report(queue=3))
    assert made.foreign == {EMBEDDER: 0, "smollm": 3}
