"""When an engine process counts as hung, and what ended it."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jumping import JumpingLoop
from worker_node.engines import process
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineLimits, EngineProcess
from worker_node.engines.watchdog import CallTimes, Death, Liveness, LivenessLimits, cause_of_death, stopped

SPEC = SimpleNamespace(model_id="m", device="CPU")


class Process(EngineProcess):
    """An engine process that is heard of when the test says so, and whose end by the watchdog is recorded."""

    pid = 1

    def __init__(self, watchdog_s):
        limits = EngineLimits(liveness=LivenessLimits(watchdog_s))
        super().__init__(SPEC, limits, Suspects(), CallTimes())
        self.killed = None

    def hear_at(self, when):
        loop = asyncio.get_running_loop()
        loop.call_at(when, lambda: self._liveness.heard(loop.time()))

    def kill_hung(self, reason):
        self.killed = asyncio.get_running_loop().time(), reason


async def _live(watchdog_s, pauses):
    """Live until the watchdog's end, heard after each of the pauses; return when it was heard last, and its end."""
    process = Process(watchdog_s)
    when = asyncio.get_running_loop().time()
    for pause in pauses:
        when += pause
        process.hear_at(when)
    await process.watch()
    return when, process.killed


@pytest.fixture(autouse=True)
def _time_of_the_loop(monkeypatch):
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


@given(
    watchdog_s=st.sampled_from([0.5, 2.5, 30.0]),
    pauses=st.lists(st.floats(0.01, 0.95), max_size=20),
)
def test_an_engine_is_killed_when_it_was_silent_for_the_watchdogs_time_and_not_before(watchdog_s, pauses):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        last_heard, (killed_at, reason) = runner.run(_live(watchdog_s, [pause * watchdog_s for pause in pauses]))
    # Exactly then: the watchdog's next look is never later than the moment at which the time is up.
    assert killed_at == pytest.approx(last_heard + watchdog_s)
    assert reason == f"hung: no heartbeat for {watchdog_s:.0f} s"


def test_a_watchdog_that_fails_looks_again(caplog):
    async def live():
        process = Process(5.0)
        sound, looks = process._liveness, iter([True])

        def look(now):
            if next(looks, False):
                raise ZeroDivisionError("what a request holds")
            return sound.look(now)

        process._liveness = SimpleNamespace(look=look)
        await process.watch()
        return process.killed[1]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(live()) == "hung: no heartbeat for 5 s"
    assert "watching m on CPU failed: ZeroDivisionError" in caplog.text
    assert "request" not in caplog.text


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_others_send_comes_from_outside_unless_memory_ran_out(number):
    assert cause_of_death(-number, out_of_memory=False).from_outside
    assert not cause_of_death(-number, out_of_memory=True).from_outside


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "the engine process died"),
        (0, "the engine process died (exit status 0)"),
        (3, "the engine process died (exit status 3)"),
        (-signal.SIGSEGV, "the engine process died (SIGSEGV)"),
        (-signal.SIGABRT, "the engine process died (SIGABRT)"),
        (-45, "the engine process died (signal 45)"),
    ],
)
def test_a_crash_is_named_by_its_signal_or_exit_status(status, reason):
    assert cause_of_death(status, out_of_memory=False) == Death(reason, from_outside=False)
