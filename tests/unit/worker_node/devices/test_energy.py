"""Energy counters and the power source, read from recorded trees of sysfs; what runs that overlap claim."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import Busy, Device, Energy
from worker_node.devices.energy import (
    EnergyCounter,
    EnergyMeter,
    PowerSource,
    energy_counter,
    power_source,
)
from worker_node.devices.npu import BusyMeter, OverlappingRuns

# Each processor's region, the byte where its energy stands, and what one count is worth, by Intel's documents.
PROCESSORS = {
    "0x130670b2": (0x628, 1 / 16384),
    "0x1306a0b2": (0x628, 1 / 16384),
    "0x1306a0b3": (0x628, 1 / 16384),
    "0x1306a0b4": (0x628, 1 / 16384),
    "0x3072005": (0x5D0, 1 / 16384),
    "0x3086000": (0x670, 1 / 16384),
    "0x308d000": (0x670, 100 / 16384),
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


def region(sysfs, guid, name="telem2"):
    """A region of 3 KiB whose every other byte is 0xEE."""
    made = write(sysfs / "intel_pmt" / name / "guid", guid).parent
    (made / "telem").write_bytes(b"\xee" * 3352)
    return made / "telem"


def put(telem, offset, count):
    with telem.open("r+b") as file:
        file.seek(offset)
        file.write(count.to_bytes(4, "little"))


def zone(sysfs, name="package-0", energy=5_000_000, span=262_143_328_850):
    made = sysfs / "powercap" / "intel-rapl:0"
    write(made / "name", name)
    write(made / "max_energy_range_uj", span)
    return write(made / "energy_uj", energy)


@pytest.mark.parametrize(("guid", "expected"), PROCESSORS.items())
def test_the_npus_energy_is_read_where_its_processor_has_it(tmp_path, guid, expected):
    offset, joules_per_count = expected
    region(tmp_path, "0x1a067102", "telem1")
    telem = region(tmp_path, guid)
    put(telem, offset, 2**32 - 1)
    meter = EnergyMeter(energy_counter(Device.NPU, sysfs=tmp_path))
    meter.begin()
    put(telem, offset, 1)
    assert meter.so_far().joules == pytest.approx(2 * joules_per_count, rel=1e-12), "it began again and lost nothing"


@pytest.mark.parametrize("device", [Device.CPU, Device.GPU])
def test_cpu_and_gpu_have_the_packages_counter(tmp_path, device):
    file = zone(tmp_path, energy=262_143_328_000)
    meter = EnergyMeter(energy_counter(device, sysfs=tmp_path))
    meter.begin()
    file.write_text("149\n")
    assert meter.so_far().joules == pytest.approx(0.001)


def test_without_a_counter_the_reason_is_told(tmp_path):
    def reason(device=Device.NPU):
        found = energy_counter(device, sysfs=tmp_path)
        meter = EnergyMeter(found)
        meter.begin()
        assert meter.so_far() == Energy(reason=found)
        return found

    assert energy_counter(Device.NPU, emulated=True) == "the NPU is emulated"
    assert "the kernel needs intel_pmt_telemetry" in reason()
    assert "the kernel needs intel_rapl_msr" in reason(Device.CPU)
    region(tmp_path, "0x9999999")
    assert "0x9999999" in reason()
    zone(tmp_path, name="psys")
    assert "intel_rapl_msr" in reason(Device.CPU)


def test_a_region_too_short_for_its_register_is_not_believed(tmp_path):
    region(tmp_path, "0x3072005").write_bytes(b"\xee" * 0x5D2)
    assert "cannot be read" in energy_counter(Device.NPU, sysfs=tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_a_counter_that_only_root_may_read_is_named(tmp_path):
    zone(tmp_path).chmod(0)
    assert "cannot be read by this user" in energy_counter(Device.CPU, sysfs=tmp_path)


class Scripted:
    """A counter in microjoules with a clock, and a meter of it."""

    def __init__(self, path, counts=262_143_328_851):
        self.path, self.counts, self.count, self.now = path, counts, 1_000_000, 0.0
        self.meter = EnergyMeter(EnergyCounter(path, 1e-6, counts, most_watts=50.0), lambda: self.now)
        self.runs = OverlappingRuns(BusyMeter(lambda: None, energy=self.meter))
        self.use(0.0, 0.0)

    def use(self, joules, seconds):
        self.count = (self.count + round(joules * 1e6)) % self.counts
        self.now += seconds
        self.path.write_text(f"{self.count}\n")


@pytest.fixture
def scripted(tmp_path):
    return Scripted(tmp_path / "energy_uj")


@pytest.mark.parametrize("moved", [-0.5, 2_000_000.0 / 16, 14.0])
def test_a_counter_that_falls_or_leaps_is_not_believed(scripted, moved):
    scripted.meter.begin()
    scripted.use(moved, 0.01)
    energy = scripted.meter.so_far()
    assert energy.joules is None
    assert energy.reason.startswith(f"the counter is not believed: it went from 1000000 to {scripted.count} in 0.010 s")

    scripted.meter.begin()
    scripted.use(0.25, 0.1)
    assert scripted.meter.so_far() == Energy(pytest.approx(0.25))


def test_what_cannot_be_told_of_a_long_run_is_not_told(scripted):
    scripted.meter.begin()
    scripted.use(100.0, 6_000.0)
    assert scripted.meter.so_far() == Energy(reason="the counter may have begun again within a run of 6000 s")


def test_a_counter_that_goes_away_during_a_run_is_named(scripted):
    scripted.meter.begin()
    scripted.path.unlink()
    assert scripted.meter.so_far() == Energy(reason=f"{scripted.path} could not be read")


@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3_000_000))))
def test_runs_claim_all_that_the_counter_says_and_no_more(tmp_path_factory, steps):
    scripted = Scripted(tmp_path_factory.mktemp("counter") / "energy_uj")
    running, claimed, used = set(), [], 0
    for run, microjoules in steps:
        scripted.use(microjoules / 1e6, 1.0)
        used += microjoules if running else 0
        if run in running:
            running.discard(run)
            claimed.append(scripted.runs.end(run).energy.joules)
        else:
            running.add(run)
            scripted.runs.begin(run)
    claimed += [scripted.runs.end(run).energy.joules for run in running]
    assert sum(claimed) == pytest.approx(used / 1e6, abs=1e-9)


def test_a_busy_meter_measures_the_energy_of_each_run(scripted):
    meter = BusyMeter(lambda: 0, energy=scripted.meter)
    scripted.use(9.0, 1.0)
    meter.begin()
    scripted.use(0.5, 1.0)
    assert meter.so_far().energy == Energy(pytest.approx(0.5))
    scripted.use(0.25, 1.0)
    assert meter.end().energy == Energy(pytest.approx(0.75))


def test_a_sum_with_an_unknown_part_is_unknown():
    unknown = Energy(reason="no counter")
    assert Busy(3, energy=Energy(1.0)).plus(Busy(4, energy=Energy(0.5))) == Busy(7, energy=Energy(1.5))
    assert Energy(1.0).plus(unknown) == unknown.plus(Energy(1.0)) == unknown
    assert Energy(3.0).part(2) == Energy(1.5)
    assert unknown.part(2) == unknown


def supply(sysfs, name, **values):
    for file, value in values.items():
        write(sysfs / "power_supply" / name / file, value)


DOCK = {"type": "USB", "online": 1, "voltage_max": 20_000_000, "current_max": 5_000_000}
SUPPLIES = {
    "a desktop": ({}, PowerSource(None)),
    "mains": ({"AC": {"type": "Mains", "online": 1}, "BAT0": {"type": "Battery"}}, PowerSource("AC")),
    "battery": (
        {"AC": {"type": "Mains", "online": 0}, "BAT0": {"type": "Battery", "status": "Discharging"}},
        PowerSource("battery", discharging=True),
    ),
    "a dock of 100 W": ({"ucsi": DOCK, "BAT0": {"type": "Battery", "status": "Charging"}}, PowerSource("AC", 100.0)),
    "a dock that is too weak": (
        {"ucsi": DOCK | {"current_max": 3_000_000}, "BAT0": {"type": "Battery", "status": "Discharging"}},
        PowerSource("AC", 60.0, discharging=True),
    ),
    "a limit of the input": ({"ucsi": DOCK | {"input_power_limit": 65_000_000}}, PowerSource("AC", 65.0)),
    "a mouse": ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, PowerSource(None)),
    "nonsense": ({"ucsi": DOCK | {"voltage_max": "much"}}, PowerSource("AC")),
    "too much to be true": ({"ucsi": DOCK | {"current_max": 5 * 10**9}}, PowerSource("AC")),
}


@pytest.mark.parametrize("case", SUPPLIES)
def test_the_power_source_is_read_with_the_watts_of_its_adapter(tmp_path, case):
    supplies, expected = SUPPLIES[case]
    for name, values in supplies.items():
        supply(tmp_path, name, **values)
    assert power_source(tmp_path) == expected
