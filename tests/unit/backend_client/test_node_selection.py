"""Which of several nodes is chosen."""

import random
from collections import Counter

from backend_client.fleet.breaker import Breaker
from backend_client.fleet.choose import choose
from backend_client.fleet.node import Node, Requirement
from backend_client.options import BreakerOptions
from tests.unit.backend_client.fakes import EMBEDDER, report


def node(url, *, queue=0, outstanding=0):
    made = Node(url, Breaker(BreakerOptions(), lambda: 100.0, random.Random(1)))
    made.take_report(report(queue=queue))
    made.outstanding[EMBEDDER] = outstanding
    return made


def chosen(nodes, times=1000):
    rng = random.Random(5)
    need = Requirement("embedding", EMBEDDER)
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
