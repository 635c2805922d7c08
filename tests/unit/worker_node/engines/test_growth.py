"""When a process whose memory grows is replaced, for any course of readings."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.restart import GrowthLimits, GrowthPolicy, MemoryReading, Recycle, default_growth

GIB = 2**30
LIMITS = GrowthLimits(growth=1000, reserve=500)
readings = st.builds(
    MemoryReading,
    base=st.integers(0, 4000),
    grown=st.integers(0, 4000),
    available=st.none() | st.integers(0, 10_000),
    idle=st.booleans(),
    loading=st.booleans(),
    retiring=st.booleans(),
)
limits = st.builds(
    GrowthLimits,
    growth=st.none() | st.integers(1, 3000),
    beside=st.booleans(),
    reserve=st.integers(0, 1000),
)


def reading(**parts):
    return dataclasses.replace(MemoryReading(base=2000, grown=1000, available=5000, idle=False), **parts)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (reading(grown=999), None),
        (reading(), Recycle.BESIDE),
        (reading(idle=True), Recycle.BESIDE),
        (reading(available=3000), Recycle.BESIDE),
        (reading(available=2999), None),
        (reading(available=2999, idle=True), Recycle.IDLE),
        (reading(available=None, idle=True), Recycle.IDLE),
        (reading(retiring=True), None),
        (reading(retiring=True, idle=True), None),
        (reading(retiring=True, grown=2000), Recycle.FORCED),
        (reading(loading=True), None),
        (reading(loading=True, idle=True), None),
        (reading(grown=2000), Recycle.BESIDE),
        (reading(grown=2000, loading=True), Recycle.FORCED),
        (reading(grown=1999, available=0), None),
        (reading(grown=2000, available=0), Recycle.FORCED),
        (reading(grown=2000, available=0, idle=True), Recycle.IDLE),
    ],
)
def test_how_a_process_is_replaced(now, expected):
    assert GrowthPolicy(LIMITS).decide(0.0, now) is expected


@given(limits, st.lists(st.tuples(st.booleans(), st.floats(0.0, 4000.0), readings), max_size=20))
def test_what_holds_for_every_course(limits, course):
    policy = GrowthPolicy(limits)
    now, retry_at = 0.0, 0.0
    for failed, pause, seen in course:
        now += pause
        if failed:
            wait = policy.failed(now)
            assert limits.first_retry_s <= wait <= limits.max_retry_s
            retry_at = now + wait
        decision = policy.decide(now, seen)
        small = limits.growth is None or seen.grown < limits.growth
        if small:
            assert decision is None
        elif seen.grown >= 2 * limits.growth:
            assert decision is not None, "the bound holds whatever else is"
        if decision is Recycle.BESIDE:
            assert limits.beside
            assert (seen.loading, seen.retiring) == (False, False), "never more than two processes"
            assert seen.available >= seen.base + limits.reserve
        if decision is Recycle.IDLE:
            assert seen.idle, "nobody's request is lost"
        if decision in {Recycle.BESIDE, Recycle.IDLE}:
            assert now >= retry_at, "a failed successor is not tried again at once"


def test_failed_successors_are_tried_ever_more_rarely_until_one_serves():
    policy = GrowthPolicy(LIMITS)
    assert [policy.failed(0.0) for _ in range(8)] == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0]
    assert all(policy.failed(0.0) == 1800.0 for _ in range(2000))
    assert policy.decide(1799.0, reading()) is None
    assert policy.decide(1800.0, reading()) is Recycle.BESIDE
    policy.succeeded()
    assert policy.decide(0.0, reading()) is Recycle.BESIDE
    assert policy.failed(0.0) == 30.0


@given(st.integers(0, 2**50))
def test_the_default_is_a_share_of_the_machine_within_bounds(total):
    growth = default_growth(total)
    assert GIB <= growth <= 8 * GIB
    if 8 * GIB <= total <= 64 * GIB:
        assert growth == total // 8
