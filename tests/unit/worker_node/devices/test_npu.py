"""The NPU: found by its driver, its counters and users, and the busy time of runs, real or emulated."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.devices.energy import EnergyMeter
from worker_node.devices.npu import (
    TOLERANCE_US,
    Busy,
    BusyMeter,
    NpuSource,
    OverlappingRuns,
    Reading,
    StandInWriter,
    Utilisation,
    busy_meter,
    find_npu,
    frequency_limits,
    npu_source,
    npu_users,
    stand_in_counter,
    version_in,
)


class Device:
    """A counter and a clock that move only when told, and a meter of them."""

    def __init__(self):
        self.count = 0
        self.now = 0.0
        self.meter = BusyMeter(lambda: self.count, lambda _seconds: None, lambda: self.now)
        self.meter.rest()

    def work(self, us, wall_us=None):
        self.count += us
        self.now += (us if wall_us is None else wall_us) / 1e6

    def run(self, us, wall_us=None):
        self.meter.begin()
        self.work(us, wall_us)
        return self.meter.end()


def test_movement_between_our_runs_means_that_others_use_the_device():
    device = Device()
    device.run(5_000)
    device.work(TOLERANCE_US + 1)
    assert device.run(5_000) == Busy(5_000, shared=True)
    assert device.run(5_000) == Busy(5_000, shared=False)


def test_sharing_seen_during_a_run_is_reported_at_once_and_kept():
    device = Device()
    made = device.meter
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


def test_a_counter_that_goes_backwards_or_vanishes_gives_no_number():
    device = Device()
    assert device.run(-5, wall_us=10).us is None
    device.meter.begin()
    device.count = None
    assert device.meter.end() == Busy(None)
    device.meter.begin()
    assert device.meter.end() == Busy(None)


def test_runs_that_overlap_share_the_time_in_which_they_do():
    device = Device()
    runs = OverlappingRuns(device.meter)
    runs.begin("a")
    device.work(1_000)
    runs.begin("b")
    device.work(3_000)
    assert runs.end("a") == Busy(2_500)
    device.work(500)
    assert runs.so_far("b") == Busy(2_000), "up to now, though no run has begun or ended since"
    assert runs.end("b") == Busy(2_000)
    runs.begin("c")
    device.work(700)
    assert runs.end("c") == Busy(700), "a run that had the device alone claims all of its time"
    assert runs.end("c") == Busy(), "it was given up before"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(3, 500), st.integers(0, 500)), max_size=40))
def test_overlapping_runs_never_claim_more_than_the_device_was_busy_or_than_they_lasted(steps):
    device = Device()
    runs, began, claimed, ended = OverlappingRuns(device.meter), {}, 0, 0
    for run, us, idle_us in steps:
        if run in began:
            busy = runs.end(run)
            assert 0 < busy.us <= (device.now - began.pop(run)) * 1e6 + 1
            assert not busy.shared
            claimed, ended = claimed + busy.us, ended + 1
        else:
            runs.begin(run)
            began[run] = device.now
        if began:
            device.work(us, wall_us=us + idle_us)
    for run in list(began):
        claimed, ended = claimed + runs.end(run).us, ended + 1
    assert device.count - ended <= claimed <= device.count


def test_what_others_used_or_was_not_measured_is_so_for_the_runs_of_that_time_alone():
    device = Device()
    runs = OverlappingRuns(device.meter)
    runs.begin("a")
    device.work(5_000, wall_us=100)
    runs.begin("b")
    device.work(100)
    assert runs.end("a") == Busy(5_050, shared=True)
    assert runs.end("b") == Busy(50, shared=False)
    runs.begin("a")
    count, device.count = device.count, None
    runs.begin("b")
    device.count = count
    runs.begin("c")
    device.work(300)
    assert [runs.end(run).us for run in ("a", "b", "c")] == [None, None, 100]


@pytest.mark.linux
def test_the_stand_in_counts_the_time_of_runs_of_all_engines_and_ends_with_its_owner():
    device = Device()
    with stand_in_counter() as path:
        writers = [StandInWriter(path) for _ in range(2)]
        made = [BusyMeter(writer.read, writer.ran, lambda: device.now) for writer in writers]
        for one in made:
            one.begin()
            device.now += 0.25
            assert one.end().us == 250_000
        counters = NpuSource(True, path, stand_in=True).read()
        assert counters.busy_time_us.value == 500_000
        assert counters.memory_bytes.reason == "the NPU is emulated"
    assert not os.path.lexists(path)


def test_utilisation_is_the_busy_share_between_two_samples():
    share = Utilisation()
    assert share.sample(0, 10.0) is None
    assert share.sample(250_000, 11.0) == 0.25
    assert share.sample(900_000, 11.5) == 0.25, "too soon after the last sample"
    assert share.sample(1_250_000, 12.0) == 1.0
    assert share.sample(5, 20.0) is None, "the counter went backwards"
    assert share.sample(None, 30.0) is None


@pytest.mark.linux
def test_the_source_is_the_kernels_the_users_or_the_stand_in(tmp_path):
    with npu_source(None, emulated=False) as real:
        assert (real.busy_counter, real.stand_in) == (find_npu() / "npu_busy_time_us", False)
    (tmp_path / "npu_busy_time_us").write_text("7\n")
    with npu_source(tmp_path, emulated=True) as scripted:
        assert (scripted.emulated, scripted.stand_in) == (True, False)
        assert scripted.read().busy_time_us.value == scripted.busy_time().value == 7
        meter = busy_meter(str(scripted.busy_counter), EnergyMeter(), stand_in=scripted.stand_in)
        meter.begin()
        (tmp_path / "npu_busy_time_us").write_text("9\n")
        assert meter.end().us == 2
        assert (tmp_path / "npu_busy_time_us").read_text() == "9\n", "a counter that was given is never written"
    with npu_source(None, emulated=True) as emulated:
        meter = busy_meter(str(emulated.busy_counter), EnergyMeter(), stand_in=emulated.stand_in)
        meter.begin()
        assert meter.end().us == emulated.read().busy_time_us.value == emulated.busy_time().value
    assert not emulated.busy_counter.exists()
    assert emulated.busy_time().value is None


def accelerator(root, number, driver):
    device = root / "devices" / f"pci{number}"
    device.mkdir(parents=True)
    if driver is not None:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(f"../../drivers/{driver}")
    entry = root / "class" / f"accel{number}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)


@pytest.mark.linux
@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        ({0: "habanalabs", 10: "intel_vpu"}, "accel10"),
        ({0: None, 1: "intel_vpu"}, "accel1"),
        ({0: "amdxdna"}, "accel0"),
        ({}, "accel0"),
    ],
)
def test_the_npu_is_the_accelerator_with_its_driver(tmp_path, drivers, expected):
    for number, driver in drivers.items():
        accelerator(tmp_path, number, driver)
    assert find_npu(tmp_path / "class") == tmp_path / "class" / expected / "device"


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("1.16.0.20250328-14132024782", "<1.16", False),
        ("1.13.0.20250131-13074932436", "<1.16", True),
        ("1.6.0", ">=1.13", False),
        ("1.35.0.1", "1.35", True),
        ("1.3.5", "1.35", False),
        ("1.16.4", ">1.16", False),
        ("1.16.4", "<=1.16", True),
        ("unknown", "<1.16", False),
    ],
)
def test_versions_are_compared_as_far_as_the_range_goes(version, wanted, inside):
    assert version_in(version, wanted) is inside


@pytest.mark.linux
def test_memory_and_frequency_are_read_once_a_second_and_a_suspended_device_has_the_frequency_0(tmp_path):
    now = [100.0]
    source = NpuSource(False, tmp_path / "npu_busy_time_us", stand_in=False, clock=lambda: now[0])
    for name in ("npu_busy_time_us", "npu_current_frequency_mhz"):
        (tmp_path / name).write_text("0\n")
    assert source.read().frequency_mhz == Reading(0), "no reason: it is a value, not a fault"
    assert source.read().memory_bytes == Reading(None, "this kernel does not have it")
    for name in ("npu_busy_time_us", "npu_current_frequency_mhz"):
        (tmp_path / name).write_text("1400\n")
    now[0] += 0.9
    assert source.read().frequency_mhz.value == 0
    assert source.read().busy_time_us.value == source.busy_time().value == 1400, "a proof needs it as it is now"
    now[0] += 0.1
    assert source.read().frequency_mhz.value == 1400


def test_frequencies_are_read_where_kernel_7_2_has_them_and_else_by_their_older_names(tmp_path):
    now = [100.0]
    source = NpuSource(False, tmp_path / "npu_busy_time_us", stand_in=False, clock=lambda: now[0])
    unknown = dict.fromkeys(("min", "efficient", "max", "set_min", "set_max"))
    assert frequency_limits(tmp_path) == unknown
    (tmp_path / "npu_current_frequency_mhz").write_text("900\n")
    (tmp_path / "npu_max_frequency_mhz").write_text("1400\n")
    assert frequency_limits(tmp_path) == unknown | {"max": 1400}
    assert (source.read().frequency_mhz.value, source.read().max_frequency_mhz.value) == (900, 1400)

    (tmp_path / "freq").mkdir()
    for name, mhz in (("hw_min", 333), ("hw_efficient", 700), ("hw_max", 1950), ("current", 0), ("set_max", 1000)):
        (tmp_path / "freq" / f"{name}_freq").write_text(f"{mhz}\n")
    now[0] += 1.0
    assert (source.read().frequency_mhz.value, source.read().max_frequency_mhz.value) == (0, 1950)
    assert frequency_limits(tmp_path) == {"min": 333, "efficient": 700, "max": 1950, "set_min": None, "set_max": 1000}


def test_the_sources_energy_is_in_microjoules_or_has_a_reason(tmp_path):
    region = tmp_path / "intel_pmt" / "telem1"
    region.mkdir(parents=True)
    (region / "guid").write_text("0x3072005\n")
    (region / "telem").write_bytes(bytes(0x5D0) + (16384 * 3).to_bytes(4, "little"))
    with npu_source(None, emulated=True, energy_sysfs=tmp_path) as source:
        assert source.read().energy_uj == Reading(3_000_000)
        (region / "telem").unlink()
        assert source.read().energy_uj == Reading(None, f"{region / 'telem'} cannot be read")


@pytest.mark.linux
def test_users_are_those_that_hold_the_device_open_and_nobody_where_the_system_does_not_tell(tmp_path):
    device, proc = tmp_path / "accel0", tmp_path / "proc"
    for process, held in (("12", device), ("7", device), ("9", tmp_path / "other"), ("self", device)):
        (proc / process / "fd").mkdir(parents=True)
        (proc / process / "fd" / "3").symlink_to(held)
    assert npu_users(proc, device) == [7, 12]
    assert npu_users(tmp_path / "none", device) == []
