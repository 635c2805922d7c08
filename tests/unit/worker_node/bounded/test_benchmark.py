"""The verdict of `bench --jobs` at the edges of what is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.bounded.benchmark import WARM_LIMIT_S, judge, percentile


def figures(**changes):
    return {
        name: {"p50_s": 1.0, "p95_s": 2.0, "limit_s": limit} | changes.get(name, {})
        for name, limit in WARM_LIMIT_S.items()
    }


@pytest.mark.parametrize(
    ("cold", "changes", "words"),
    [
        (15.0, {}, None),
        (15.1, {}, "cold first generation"),
        (1.0, {"title": {"p50_s": 4.9}}, None),
        (1.0, {"title": {"p50_s": 5.0}}, "title took"),
        (1.0, {"notification": {"p50_s": 5.0}}, "notification took"),
        (1.0, {"summary": {"p50_s": 9.9, "p95_s": 15.0}}, None),
        (1.0, {"summary": {"p50_s": 10.0}}, "summary took"),
        (1.0, {"memory_candidate": {"p95_s": 15.1}}, "no-go: memory_candidate"),
    ],
)
def test_what_is_accepted(cold, changes, words):
    problems = judge(cold, figures(**changes))
    if words is None:
        assert not problems
    else:
        (problem,) = problems
        assert words in problem


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_covers_the_share(values, share):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9
