"""Restart decisions over an injected clock."""

from hypothesis import given
from hypothesis import strategies as st

from worker_node.hosting.restart import RestartLimits, RestartPolicy

LIMITS = RestartLimits()


def test_backoff_doubles():
    policy = RestartPolicy(RestartLimits(crash_limit=100))
    assert [policy.crashed(float(i), "died").delay for i in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_three_crashes_in_a_minute_quarantine_with_the_reason():
    policy = RestartPolicy()
    assert not policy.crashed(0.0, "signal 9").quarantined
    assert not policy.crashed(10.0, "signal 9").quarantined
    verdict = policy.crashed(59.0, "signal 11")
    assert verdict.quarantined
    assert verdict.delay == LIMITS.quarantine_s
    assert "3 crashes within 60 s" in verdict.reason
    assert "signal 11" in verdict.reason


def test_three_crashes_spread_over_more_than_a_minute_do_not():
    policy = RestartPolicy()
    assert not any(policy.crashed(t, "died").quarantined for t in (0.0, 31.0, 62.0, 93.0))


def test_a_quiet_minute_forgives():
    policy = RestartPolicy()
    policy.crashed(0.0, "died")
    assert policy.crashed(5.0, "died").delay == 1.0
    assert policy.crashed(65.0 + 5.0, "died").delay == 0.5


def test_wrong_answers_quarantine_at_once():
    verdict = RestartPolicy(RestartLimits(quarantine_s=7.0)).distrusted("canary failed")
    assert (verdict.quarantined, verdict.delay, verdict.reason) == (True, 7.0, "canary failed")


def test_after_a_quarantine_the_engine_gets_another_try():
    policy = RestartPolicy()
    for t in (0.0, 1.0, 2.0):
        verdict = policy.crashed(t, "died")
    assert verdict.quarantined
    assert not policy.crashed(2.0 + LIMITS.quarantine_s, "died").quarantined


@given(st.lists(st.floats(0.0, 120.0), min_size=1, max_size=40))
def test_delays_stay_in_their_bounds(gaps):
    policy = RestartPolicy()
    now = 0.0
    for gap in gaps:
        now += gap
        verdict = policy.crashed(now, "died")
        if verdict.quarantined:
            assert verdict.delay == LIMITS.quarantine_s
        else:
            assert LIMITS.first_backoff_s <= verdict.delay <= LIMITS.max_backoff_s
