"""When an engine process counts as hung, and what ended it: over clocks and readings that the test sets."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jumping import JumpingLoop
from worker_node.devices.memory import MemoryReader
from worker_node.engines import process
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineLimits, EngineProcess
from worker_node.engines.watchdog import (
    CallTimes,
    KillWatch,
    Liveness,
    LivenessLimits,
    LoadActivity,
    LoadWatch,
    activity_of,
)

SPEC = SimpleNamespace(model_id="m", device="CPU")


class Process(EngineProcess):
    """An engine process that is heard of when the test says so, and whose end by the watchdog is recorded."""

    pid = 1

    def __init__(self, watchdog_s):
        limits = EngineLimits(liveness=LivenessLimits(watchdog_s))
        super().__init__(SPEC, limits, Suspects(), KillWatch(), CallTimes())
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


GIB = 1 << 30


class Kernel:
    def __init__(self):
        self.own, self.left, self.kills = GIB, 8 * GIB, 3
        self.watch = KillWatch(MemoryReader(lambda _pid: self.own, lambda: self.left, lambda: self.kills))

    def look(self, *times):
        for now in times:
            self.watch.look(now, 1)

    def outside(self, status=-signal.SIGKILL):
        return self.watch.verdict(status).from_outside


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_others_send_comes_from_outside(number):
    kernel = Kernel()
    kernel.look(0.0)
    assert kernel.outside(-number)


@pytest.mark.parametrize(
    "status",
    [
        None,
        0,
        1,
        134,
        139,
        *(-n for n in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)),
    ],
)
def test_a_crash_is_not_a_kill_from_outside(status):
    kernel = Kernel()
    kernel.look(0.0)
    assert not kernel.outside(status)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "the engine process died"),
        (3, "the engine process died (exit status 3)"),
        (-signal.SIGSEGV, "the engine process died (SIGSEGV)"),
        (-signal.SIGKILL, "the engine process was killed from outside (SIGKILL)"),
        (-45, "the engine process died (signal 45)"),
    ],
)
def test_the_reason_names_the_signal_or_the_exit_status(status, reason):
    kernel = Kernel()
    kernel.look(0.0)
    assert kernel.watch.verdict(status).reason == reason


def test_the_reason_tells_what_speaks_for_the_memory():
    kernel = Kernel()
    kernel.look(0.0)
    kernel.kills += 1
    assert "the kernel has killed for lack of memory" in kernel.watch.verdict(-signal.SIGKILL).reason
    kernel.kills -= 1
    kernel.own += 2 * GIB
    kernel.look(1.0)
    assert "its memory had just grown by 2147 MB" in kernel.watch.verdict(-signal.SIGKILL).reason


def test_an_engine_that_loads_grows_anyway():
    kernel = Kernel()
    for now in range(3):
        kernel.watch.look(now, 1, loading=True)
        kernel.own += 2 * GIB
    assert kernel.outside()
    kernel.left = GIB // 4
    kernel.watch.look(3, 1, loading=True)
    assert not kernel.outside()


def test_nothing_is_known_without_a_reading():
    assert not Kernel().outside()


def test_a_kill_for_memory_does_not_though_it_was_counted_before_the_last_look():
    kernel = Kernel()
    kernel.look(*range(11))
    kernel.kills += 1
    kernel.look(11, 12)
    assert not kernel.outside()


def test_kills_long_ago_do_not_count():
    kernel = Kernel()
    kernel.look(*range(6))
    kernel.kills += 1
    kernel.look(*range(6, 30))
    assert kernel.outside()


def test_where_the_kernel_counts_nothing_the_growth_of_the_engine_decides():
    kernel = Kernel()
    kernel.kills = None
    kernel.look(0.0, 1.0)
    assert kernel.outside()
    kernel.own += GIB
    kernel.look(2.0)
    assert not kernel.outside()
    kernel.look(*range(3, 30))
    assert kernel.outside(), "it has grown long ago"


def test_growth_that_was_read_before_it_ended_counts_though_it_has_no_memory_now():
    kernel = Kernel()
    kernel.look(0.0)
    kernel.own += 2 * GIB
    kernel.look(1.0)
    kernel.own = None
    kernel.look(2.0)
    assert not kernel.outside()


def test_an_exhausted_machine_counts_as_a_kill_for_memory():
    kernel = Kernel()
    kernel.left = GIB // 4
    kernel.look(0.0)
    assert not kernel.outside()
