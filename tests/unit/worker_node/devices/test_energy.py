"""Energy counters, read from recorded trees of sysfs."""

import os

import pytest

from worker_node.core.types import Device
from worker_node.devices.energy import EnergyCounter, Unmeasured, energy_counter

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


def region(root, guid, name="telem2"):
    """A region of 3 KiB whose every other byte is 0xEE."""
    made = root / name
    made.mkdir(parents=True)
    (made / "guid").write_text(f"{guid}\n")
    (made / "telem").write_bytes(b"\xee" * 3352)
    return made / "telem"


def put(telem, offset, count):
    with telem.open("r+b") as file:
        file.seek(offset)
        file.write(count.to_bytes(4, "little"))


def zone(root, name="package-0", energy=5_000_000, span=262_143_328_850):
    made = root / "intel-rapl:0"
    made.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", span)):
        (made / file).write_text(f"{text}\n")
    return made / "energy_uj"


@pytest.mark.parametrize(("guid", "expected"), PROCESSORS.items())
def test_the_npus_energy_is_read_where_its_processor_has_it(tmp_path, guid, expected):
    offset, joules_per_count = expected
    region(tmp_path, "0x1a067102", "telem1")
    telem = region(tmp_path, guid)
    put(telem, offset, 1_000_000)
    counter = energy_counter(Device.NPU, pmt=tmp_path)
    before = counter.read()
    put(telem, offset, 1_000_001)
    assert counter.joules(before, counter.read()) == pytest.approx(joules_per_count, rel=1e-12)


def test_a_counter_that_began_again_lost_nothing(tmp_path):
    telem = region(tmp_path, "0x3086000")
    put(telem, 0x670, 2**32 - 16384)
    counter = energy_counter(Device.NPU, pmt=tmp_path)
    before = counter.read()
    put(telem, 0x670, 16384)
    assert counter.joules(before, counter.read()) == pytest.approx(2.0)


@pytest.mark.parametrize("device", [Device.CPU, Device.GPU])
def test_cpu_and_gpu_have_the_packages_counter(tmp_path, device):
    file = zone(tmp_path, energy=262_143_328_000)
    counter = energy_counter(device, powercap=tmp_path)
    before = counter.read()
    file.write_text("149\n")
    assert counter.joules(before, counter.read()) == pytest.approx(0.001)


def test_without_a_counter_the_reason_is_told(tmp_path):
    def reason(device=Device.NPU, **places):
        found = energy_counter(device, **places)
        assert isinstance(found, Unmeasured)
        return found.reason

    assert reason(emulated=True) == "the NPU is emulated"
    assert "the kernel needs intel_pmt_telemetry" in reason(pmt=tmp_path)
    assert "the kernel needs intel_rapl_msr" in reason(Device.CPU, powercap=tmp_path)
    region(tmp_path, "0x9999999")
    assert "0x9999999" in reason(pmt=tmp_path)
    zone(tmp_path, name="psys")
    assert "intel_rapl_msr" in reason(Device.CPU, powercap=tmp_path)


def test_a_region_too_short_for_its_register_is_not_believed(tmp_path):
    telem = region(tmp_path, "0x3072005")
    telem.write_bytes(b"\xee" * 0x5D2)
    assert "cannot be read" in energy_counter(Device.NPU, pmt=tmp_path).reason


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_a_counter_that_only_root_may_read_is_named(tmp_path):
    zone(tmp_path).chmod(0)
    assert "cannot be read by this user" in energy_counter(Device.CPU, powercap=tmp_path).reason


def test_a_failed_read_gives_no_energy(tmp_path):
    counter = EnergyCounter(tmp_path / "none", 1.0, 10)
    assert counter.read() is None
    assert counter.joules(None, 3) is None
    assert counter.joules(3, None) is None
