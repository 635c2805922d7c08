"""Busy time around runs, and when it is known that the device was not ours alone."""

import os

from hypothesis import given
from hypothesis import strategies as st

from worker_node.devices.emulated_npu import StandInCounter, StandInWriter
from worker_node.devices.npu import (
    TOLERANCE_US,
    Busy,
    BusyMeter,
    SysfsCounter,
    Utilisation,
    read_counters,
    read_stand_in,
)


class Device:
    """A counter and a clock that move only when told."""

    def __init__(self):
        self.count = 0
        self.now = 0.0

    def read(self):
        return self.count

    def ran(self, seconds):
        pass

    def clock(self):
        return self.now

    def work(self, us, wall_us=None):
        self.count += us
        self.now += (us if wall_us is None else wall_us) / 1e6


def meter(device):
    made = BusyMeter(device, device.clock)
    made.rest()
    return made


def run(made, device, us, wall_us=None):
    made.begin()
    device.work(us, wall_us)
    return made.end()


def test_a_run_alone_is_measured_and_nothing_more_is_claimed():
    device = Device()
    assert run(meter(device), device, 5_000, wall_us=6_000) == Busy(5_000, shared=False)


def test_movement_between_our_runs_means_that_others_use_the_device():
    device = Device()
    made = meter(device)
    run(made, device, 5_000)
    device.work(TOLERANCE_US + 1)
    assert run(made, device, 5_000) == Busy(5_000, shared=True)
    assert run(made, device, 5_000) == Busy(5_000, shared=False)


def test_more_busy_time_than_the_run_lasted_means_that_others_use_the_device():
    device = Device()
    assert run(meter(device), device, 9_000, wall_us=4_000).shared


def test_what_is_known_in_mid_run_is_told_then_and_not_forgotten():
    device = Device()
    made = meter(device)
    made.begin()
    device.work(5_000)
    assert made.so_far() == Busy(5_000, shared=False)
    device.work(5_000, wall_us=1_000)
    assert made.so_far() == Busy(10_000, shared=True)
    device.work(0, wall_us=60_000)
    assert made.so_far() == made.end() == Busy(10_000, shared=True)
    device.work(TOLERANCE_US + 1)
    made.begin()
    assert made.so_far().shared, "it moved between the runs"


def test_what_moved_before_the_first_run_was_loading():
    device = Device()
    made = BusyMeter(device, device.clock)
    device.work(1_000_000)
    made.rest()
    assert not run(made, device, 10).shared


def test_a_counter_that_goes_backwards_or_vanishes_gives_no_number():
    device = Device()
    made = meter(device)
    assert run(made, device, -5, wall_us=10).us is None
    made.begin()
    device.count = None
    assert made.end() == Busy(None)
    assert run(made, Device(), 5) == Busy(None)


@given(st.lists(st.integers(0, 10**6), max_size=20))
def test_the_sum_of_our_runs_is_what_the_counter_moved(runs):
    device = Device()
    made = meter(device)
    assert sum(run(made, device, us).us for us in runs) == device.count


def test_the_stand_in_counts_the_time_of_runs_of_all_engines_and_ends_with_its_owner():
    stand_in = StandInCounter()
    device = Device()
    made = [BusyMeter(StandInWriter(stand_in.path), device.clock) for _ in range(2)]
    for one in made:
        one.begin()
        device.now += 0.25
        assert one.end().us == 250_000
    assert read_stand_in(stand_in.path).busy_time_us.value == 500_000
    assert read_stand_in(stand_in.path).memory_bytes.reason == "the NPU is emulated"
    path = stand_in.path
    stand_in.close()
    assert not os.path.lexists(path)


def test_the_kernels_files_are_read_or_the_reason_told(tmp_path):
    (tmp_path / "npu_busy_time_us").write_text("1234\n")
    (tmp_path / "npu_memory_utilization").write_text("much\n")
    counters = read_counters(tmp_path)
    assert counters.busy_time_us.value == 1234
    assert counters.memory_bytes.reason == "does not hold a number"
    assert counters.frequency_mhz.reason == "this kernel does not have it"
    assert "no NPU at" in read_counters(tmp_path / "missing").busy_time_us.reason
    assert SysfsCounter(tmp_path / "npu_busy_time_us").read() == 1234
    assert SysfsCounter(tmp_path / "missing").read() is None


def test_utilisation_is_the_busy_share_between_two_looks():
    share = Utilisation()
    assert share.look(0, 10.0) is None
    assert share.look(250_000, 11.0) == 0.25
    assert share.look(900_000, 11.5) == 0.25, "too soon after the last look"
    assert share.look(1_250_000, 12.0) == 1.0
    assert share.look(5, 20.0) is None, "the counter went backwards"
    assert share.look(None, 30.0) is None
