"""When an engine process counts as hung, and what ended it."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.protocol import NativeCall
from worker_node.engines.watchdog import Blame, Death, Liveness, LivenessLimits, cause_of_death, stopped

LIMITS = LivenessLimits(watchdog_s=30.0, run_timeout_s=180.0)


def alive():
    return Liveness(LIMITS, 0.0)


def hung_at(liveness, now=0.0, until=10_000.0):
    """The time at which an engine that sends nothing more counts as hung, looked at as often as it wants to be."""
    while now < until:
        reason, pause = liveness.look(now)
        if reason is not None:
            return now, reason
        now += pause
    return None, None


@given(pauses=st.lists(st.floats(0.01, 28.5), max_size=20))
def test_an_engine_hangs_when_it_was_silent_for_the_watchdogs_time_and_not_before(pauses):
    liveness, now = alive(), 0.0
    for pause in pauses:
        assert hung_at(liveness, now, now + pause)[0] is None
        now += pause
        liveness.heard_at = now
    when, reason = hung_at(liveness, now)
    assert when == pytest.approx(now + 30.0)
    assert reason == "hung: no heartbeat for 30 s"


@pytest.mark.parametrize(("first", "units", "allowed_s"), [(True, 1, 180), (False, 40, 34), (False, 9999, 180)])
def test_a_call_gets_a_time_by_its_size_and_the_first_of_its_kind_the_longest(first, units, allowed_s):
    liveness = alive()
    liveness.heard_at, liveness.call = 5.0, NativeCall("step", units, [1], first)
    when, reason = hung_at(liveness, 5.0)
    assert when == pytest.approx(5.0 + allowed_s)
    assert reason == f"hung: step of {units} tokens did not return within {allowed_s} s"


def test_a_call_that_returned_is_judged_no_more():
    liveness = alive()
    liveness.call = NativeCall("prefill", 500, [1])
    liveness.heard_at, liveness.call = 100.0, None
    assert hung_at(liveness, 100.0)[0] == pytest.approx(130.0)


def test_a_run_that_never_ends_behind_a_beating_loop_is_a_hang():
    liveness = alive()
    liveness.ran = True
    for second in range(1, 200):
        liveness.heard_at, liveness.run = second, (10, second - 0.5)
        reason, _ = liveness.look(second)
        if reason is not None:
            break
    assert second == 32
    assert reason == "hung: a run of 10 tokens has not ended within 31 s"


def test_the_first_run_gets_the_longest_time():
    liveness = alive()
    liveness.heard_at, liveness.run = 179.0, (10, 179.0)
    assert liveness.look(179.0)[0] is None
    liveness.heard_at, liveness.run = 180.0, (10, 180.0)
    assert liveness.look(180.0)[0] == "hung: a run of 10 tokens has not ended within 180 s"


def test_a_loop_that_stops_beating_during_a_run_is_a_hang():
    liveness = alive()
    liveness.heard_at, liveness.run, liveness.ran = 1.0, (10_000, 0.5), True
    assert hung_at(liveness, 1.0) == (pytest.approx(31.0), "hung: no heartbeat for 30 s")


def test_a_node_that_was_stopped_reads_what_the_engine_sent_before_it_judges():
    liveness = alive()
    assert liveness.look(0.0)[0] is None
    reason, pause = liveness.look(500.0)
    assert reason is None, "the node itself was stopped for 500 s"
    liveness.heard_at = 500.1
    assert liveness.look(500.0 + pause)[0] is None


@pytest.mark.linux
def test_a_stopped_process_is_told_from_one_that_runs():
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert not stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not stopped(process.pid)


# Windows: Task Manager, psutil and os.kill, Ctrl-C. Linux: SIGKILL, SIGTERM, SIGHUP, SIGINT.
@pytest.mark.parametrize("status", (1, 15, 0xC000013A) if sys.platform == "win32" else (-9, -15, -1, -2))
def test_an_end_by_others_comes_from_outside_unless_memory_ran_out(status):
    assert cause_of_death(status, out_of_memory=False).blame is Blame.OUTSIDE
    assert cause_of_death(status, out_of_memory=True).blame is Blame.UNKNOWN


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "the engine process died"),
        (0, "the engine process died (exit status 0)"),
        (3, "the engine process died (exit status 3)"),
        (-signal.SIGSEGV, "the engine process died (SIGSEGV)"),
        (-signal.SIGABRT, "the engine process died (SIGABRT)"),
        (-45, "the engine process died (signal 45)"),
        (0xC0000005, "the engine process died (exit status 0xC0000005)"),
    ],
)
def test_a_crash_is_named_by_its_signal_or_exit_status(status, reason):
    assert cause_of_death(status, out_of_memory=False) == Death(reason)
