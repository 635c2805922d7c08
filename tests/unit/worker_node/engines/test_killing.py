"""Which deaths of an engine count as kills from outside: over scripted readings of memory."""

import signal

import pytest

from worker_node.devices.memory import MemoryReader
from worker_node.engines.watchdog import KillWatch

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
