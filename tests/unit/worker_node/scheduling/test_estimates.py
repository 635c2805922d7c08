"""The drain rate follows the device, not the traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.scheduling.estimates import DrainRate


def test_nothing_finished_means_no_rate():
    rate = DrainRate()
    rate.begin(1, 0.0)
    assert rate.per_second(5.0) is None


def test_idle_time_does_not_count():
    rate = DrainRate()
    for start in (0.0, 1000.0, 5000.0):
        rate.begin(10, start)
        rate.end(10, start + 1.0, done=True)
    assert rate.per_second(9000.0) == pytest.approx(10, rel=0.05)


def test_recent_work_weighs_more():
    rate = DrainRate(half_life_s=1.0)
    now = 0.0
    for seconds in [1.0] * 10 + [0.1] * 100:
        rate.begin(1, now)
        now += seconds
        rate.end(1, now, done=True)
    assert rate.per_second(now) > 8


def test_what_was_given_up_is_not_work_done():
    rate = DrainRate()
    rate.begin(5, 0.0)
    rate.end(5, 1.0, done=False)
    assert rate.outstanding == 0
    assert rate.per_second(1.0) is None


@given(st.floats(0.5, 500), st.integers(1, 50))
def test_a_steady_device_is_measured_right(speed, units):
    rate = DrainRate()
    now = 0.0
    for _ in range(40):
        rate.begin(units, now)
        now += units / speed
        rate.end(units, now, done=True)
    assert rate.per_second(now) == pytest.approx(speed, rel=1.5 if units / speed > 10 else 0.6)
