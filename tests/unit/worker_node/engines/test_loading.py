"""Whether an engine that loads makes progress, judged by its CPU time. The clock is the test's."""

import os
import signal
import subprocess
import sys
import time

import pytest

from worker_node.engines.watchdog import LoadActivity, LoadWatch, activity_of


def looked(activities, limit_s=30.0, pause=1.0):
    """The second in which a load with these activities, one for each look, counts as hung; None if it never does."""
    watch = LoadWatch(limit_s, 0.0)
    for index, activity in enumerate(activities, 1):
        if watch.look(index * pause, activity):
            return index
    return None


def test_a_load_that_computes_for_minutes_is_left_alone():
    assert looked([LoadActivity(spent, busy=False) for spent in range(600)]) is None


def test_a_load_that_stops_computing_hangs_from_then_on():
    assert looked([LoadActivity(min(spent, 100), busy=False) for spent in range(600)]) == 101 + 30


@pytest.mark.parametrize(
    "activity", [LoadActivity(5, busy=True), None], ids=["waits for a core or a disk", "unreadable"]
)
def test_a_load_of_which_nothing_bad_is_known_is_left_alone(activity):
    assert looked([activity] * 600) is None


def test_time_in_which_nobody_looked_does_not_count():
    assert looked([LoadActivity(5, busy=False)] * 3, pause=3600.0) is None


def test_the_kernel_tells_a_stopped_process_from_one_that_computes():
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        while not activity_of(process.pid).spent:
            time.sleep(0.005)  # the kernel counts in hundredths of a second
        assert activity_of(process.pid).busy
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        first, second = activity_of(process.pid), activity_of(process.pid)
        assert first == second
        assert not first.busy
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert activity_of(process.pid) is None
    assert activity_of(None) is None
