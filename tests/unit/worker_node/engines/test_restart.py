"""When an engine that ended is started again, and when one that grows is replaced: over an injected clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.protocol import EngineState
from worker_node.engines.restart import GrowthLimits, RestartLimits, RestartPolicy, default_growth

LIMITS = RestartLimits()
QUARANTINED = EngineState.QUARANTINED


def test_three_crashes_within_the_window_quarantine_with_the_reason():
    policy = RestartPolicy()
    assert policy.crashed(0.0, "signal 9").state is not QUARANTINED
    assert policy.crashed(10.0, "signal 9").state is not QUARANTINED
    pause = policy.crashed(599.0, "signal 11")
    assert pause.state is QUARANTINED
    assert pause.seconds == LIMITS.quarantine_s
    assert "3 crashes within 600 s" in pause.reason
    assert "signal 11" in pause.reason


def test_serving_for_the_window_clears_the_history():
    policy = RestartPolicy()
    policy.crashed(0.0, "died")
    assert policy.crashed(5.0, "died").seconds == 1.0
    assert policy.crashed(610.0, "died", served_s=600.0).seconds == 0.5
    assert policy.crashed(615.0, "died").state is not QUARANTINED


def test_neither_the_deaths_of_a_suspect_nor_the_one_that_made_it_a_suspect_count():
    policy = RestartPolicy()
    for n in range(20):
        assert policy.crashed(float(n), "died").state is not QUARANTINED
        assert policy.blameless("died").seconds == LIMITS.first_backoff_s
    assert policy.crashed(20.0, "died").state is not QUARANTINED
    assert policy.crashed(21.0, "died").state is not QUARANTINED
    assert policy.crashed(22.0, "died").state is QUARANTINED


def test_kills_from_outside_back_off_and_never_quarantine():
    policy = RestartPolicy()
    pauses = [policy.killed("SIGKILL", served_s=1.0) for _ in range(2000)]
    assert [pause.seconds for pause in pauses[:8]] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert pauses[-1].seconds == LIMITS.max_backoff_s
    assert not any(pause.state is QUARANTINED for pause in pauses)
    assert policy.crashed(0.0, "died").state is not QUARANTINED, "kills count as no crashes"


@pytest.mark.parametrize("cause", ["crashes", "wrong answers"])
@pytest.mark.parametrize("served_s", [0.0, 1.0, 599.0])
def test_after_a_quarantine_there_is_one_attempt(cause, served_s):
    policy = RestartPolicy()
    if cause == "crashes":
        assert [policy.crashed(float(n), "died").state is QUARANTINED for n in range(3)][-1]
    else:
        assert policy.quarantine("garbage").state is QUARANTINED
    now = 2.0
    for _ in range(4):
        now += LIMITS.quarantine_s + served_s
        pause = policy.crashed(now, "died", served_s=served_s)
        assert pause.state is QUARANTINED
        assert "again after a quarantine" in pause.reason


GIB = 2**30


@pytest.mark.parametrize(
    ("grown", "idle", "expected"),
    [
        (999, True, None),
        (1000, False, None),
        (1000, True, "idle"),
        (1999, False, None),
        (2000, False, "forced"),
        (2000, True, "idle"),
    ],
)
def test_how_a_process_is_replaced(grown, idle, expected):
    assert GrowthLimits(growth=1000).replacement(grown, idle=idle) == expected
    assert GrowthLimits().replacement(grown, idle=idle) is None


@given(st.integers(0, 2**50))
def test_the_default_is_a_share_of_the_machine_within_bounds(total):
    growth = default_growth(total)
    assert GIB <= growth <= 8 * GIB
    if 8 * GIB <= total <= 64 * GIB:
        assert growth == total // 8
