"""When an engine counts as hung, over a clock that the test sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.watchdog import CallTimes, Liveness, LivenessLimits

LIMITS = LivenessLimits(watchdog_s=30.0, run_timeout_s=180.0)


def alive(times=None):
    return Liveness(LIMITS, times or CallTimes(), 0.0)


def hung_at(liveness, now=0.0, until=10_000.0):
    """The time at which an engine that sends nothing more counts as hung, looked at as often as it wants to be."""
    while now < until:
        reason, pause = liveness.look(now)
        if reason is not None:
            return now, reason
        now += pause
    return None, None


def test_silence_outside_of_a_call_is_a_hang_after_the_watchdogs_time():
    assert hung_at(alive()) == (pytest.approx(30.0), "hung: no heartbeat for 30 s")


def test_a_long_prefill_is_not_a_hang_before_anything_like_it_is_known():
    liveness = alive()
    liveness.called("prefill", 1000, 0.0)
    when, reason = hung_at(liveness)
    assert when == pytest.approx(180.0)
    assert reason == "hung: prefill of 1000 tokens did not return within 180 s"


def test_a_long_prefill_is_given_the_time_that_a_short_one_suggests():
    times = CallTimes()
    times.learn("prefill", 64, 1.0)
    liveness = alive(times)
    liveness.called("prefill", 250, 0.0)
    assert hung_at(liveness)[0] == pytest.approx(30.0), "never less than the watchdog's time"
    liveness = alive(times)
    liveness.called("prefill", 511, 0.0)
    # Two sizes further, so four times four as long; and four times that, since the machine may be busy.
    assert hung_at(liveness)[0] == pytest.approx(64.0)


def test_a_call_that_returned_is_judged_no_more_and_has_been_learned_from():
    liveness = alive()
    liveness.called("prefill", 500, 0.0)
    liveness.heard(100.0)
    assert liveness.times.expected("prefill", 500) == 100.0
    assert hung_at(liveness, 100.0)[0] == pytest.approx(130.0)


def test_a_run_that_never_ends_behind_a_beating_loop_is_a_hang():
    liveness = alive()
    liveness.beat(None, (512, 0.1))
    for second in range(1, 200):
        liveness.heard(second)
        liveness.beat((512, second - 0.5), (512, 0.1))
        reason, _ = liveness.look(second)
        if reason is not None:
            break
    assert second == 31
    assert reason == "hung: a run of 512 tokens has not ended within 30 s"


def test_a_node_that_was_stopped_reads_what_the_engine_sent_before_it_judges():
    liveness = alive()
    assert liveness.look(0.0)[0] is None
    reason, pause = liveness.look(500.0)
    assert reason is None, "the node itself was stopped for 500 s"
    liveness.heard(500.1)
    assert liveness.look(500.0 + pause)[0] is None


def test_a_hang_is_found_even_if_every_look_comes_late():
    liveness = alive()
    assert [liveness.look(now)[0] is None for now in (0.0, 50.0, 100.0)] == [True, True, False]


@given(
    seen=st.lists(st.tuples(st.integers(1, 4096), st.floats(0.001, 200.0)), min_size=1, max_size=20),
    units=st.integers(1, 4096),
)
def test_the_allowed_time_stays_in_its_bounds_and_covers_what_was_seen(seen, units):
    times = CallTimes()
    for size, seconds in seen:
        times.learn("run", size, seconds)
    allowed = alive(times).allowed("run", units)
    assert 30.0 <= allowed <= 180.0
    last_units, last_s = seen[-1]
    assert alive(times).allowed("run", last_units) >= min(180.0, 4 * last_s)


@given(st.lists(st.floats(0.001, 29.0), min_size=1, max_size=60))
def test_an_engine_that_is_heard_of_in_time_is_never_hung(pauses):
    liveness = alive()
    now = 0.0
    for pause in pauses:
        due = now + pause
        while True:
            reason, wait = liveness.look(now)
            assert reason is None
            if now + wait >= due:
                break
            now += wait
        now = due
        liveness.heard(now)


def test_a_slow_call_fades():
    times = CallTimes()
    times.learn("step", 100, 40.0)
    for _ in range(200):
        times.learn("step", 100, 0.1)
    assert times.expected("step", 100) == pytest.approx(0.1)


def test_an_idle_engine_is_looked_at_seldom_and_a_busy_one_every_second():
    liveness = alive()
    assert liveness.look(0.0) == (None, 5.0)
    liveness.heard(4.0)
    liveness.beat((512, 0.1), None)
    assert liveness.look(5.0) == (None, 1.0)
    liveness.heard(5.5)
    liveness.beat(None, (512, 0.3))
    assert liveness.look(6.0) == (None, 5.0)
    liveness.called("prefill", 64, 7.0)
    assert liveness.look(11.0) == (None, 1.0)
