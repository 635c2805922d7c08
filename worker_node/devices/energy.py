"""How much energy a device used, by the kernel's cumulative counters, and what supplies the machine.

The NPU's counter is a register of Intel's Platform Monitoring Technology (PMT). Where it is depends on the processor,
which the region's GUID names; a region with an unknown GUID is not read. CPU and GPU share the counter of the
processor's package (RAPL), which counts all that runs there, the NPU too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker_node.core.types import Device, Energy

SYSFS = Path("/sys/class")

# No NPU and no package of a laptop or desktop draws more for long; a counter that says so is not believed. What an
# update of the counter adds at once may be of the time before the read.
_NPU_WATTS, _PACKAGE_WATTS = 50.0, 300.0
_UPDATED_WITHIN_S = 0.25
_MOST_ADAPTER_WATTS = 1000

# The counter has 32 bits, 14 of them after the point of a joule; on Wildcat Lake one count is a hundred times as much.
_PMT_COUNTS = 1 << 32
_PMT_JOULES = 1 / (1 << 14)


@dataclass(frozen=True, slots=True)
class Register:
    processor: str
    offset: int
    joules_per_count: float = _PMT_JOULES


# Intel's registers, as its own monitor reads them (intel/linux-npu-driver, tools/intel-npu-smi).
REGISTERS = {
    0x130670B2: Register("Meteor Lake", 0x628),
    0x1306A0B2: Register("Arrow Lake-H", 0x628),
    0x1306A0B3: Register("Arrow Lake", 0x628),
    0x1306A0B4: Register("Arrow Lake-S", 0x628),
    0x03072005: Register("Lunar Lake", 0x5D0),
    0x03086000: Register("Panther Lake", 0x670),
    0x0308D000: Register("Wildcat Lake", 0x670, 100 * _PMT_JOULES),
}


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A counter that begins again at 0 after `counts`: 4 bytes at the `offset`, else a decimal number."""

    path: Path
    joules_per_count: float
    counts: int
    most_watts: float
    offset: int | None = None

    def read(self) -> int | None:
        try:
            with self.path.open("rb", buffering=0) as file:
                if self.offset is None:
                    return int(file.read(32))
                file.seek(self.offset)
                found = file.read(4)
        except (OSError, ValueError):
            return None
        return int.from_bytes(found, "little") if len(found) == 4 else None

    def energy(self, before: int | None, after: int | None, seconds: float) -> Energy:
        """What was used between two reads `seconds` apart, if it can be told and be true."""
        if before is None or after is None:
            return Energy(reason=f"{self.path} could not be read")
        most = self.most_watts * (seconds + _UPDATED_WITHIN_S)
        if most >= self.counts * self.joules_per_count:
            return Energy(reason=f"the counter may have begun again within a run of {seconds:.0f} s")
        joules = (after - before) % self.counts * self.joules_per_count
        if joules > most:
            return Energy(reason=f"the counter is not believed: it went from {before} to {after} in {seconds:.3f} s")
        return Energy(joules)


@dataclass(slots=True)
class EnergyMeter:
    """Measures run after run: `begin` before, `so_far` in and after each. `source`: the counter, or why none."""

    source: EnergyCounter | str = "not measured"
    clock: Callable[[], float] = time.monotonic
    _before: int | None = None
    _began: float = 0.0

    def begin(self) -> None:
        if isinstance(self.source, EnergyCounter):
            self._began, self._before = self.clock(), self.source.read()

    def so_far(self) -> Energy:
        if isinstance(self.source, str):
            return Energy(reason=self.source)
        return self.source.energy(self._before, self.source.read(), self.clock() - self._began)


def energy_counter(device: Device, *, emulated: bool = False, sysfs: Path | None = None) -> EnergyCounter | str:
    """The counter of a device on this machine, which was read once, or the reason why there is none.

    `sysfs` is a directory to read in place of /sys/class: then that is the counter of an emulated NPU, too.
    """
    if emulated and sysfs is None:
        return "the NPU is emulated"
    root = sysfs or SYSFS
    found = _npu_counter(root / "intel_pmt") if device is Device.NPU else _package_counter(root / "powercap")
    if isinstance(found, EnergyCounter) and found.read() is None:
        return f"{found.path} cannot be read by this user"
    return found


def _npu_counter(pmt: Path) -> EnergyCounter | str:
    unknown = []
    for region in sorted(pmt.glob("telem*")):
        try:
            guid = int((region / "guid").read_text(), 16)
        except (OSError, ValueError):
            continue
        if (register := REGISTERS.get(guid)) is not None:
            telem = region / "telem"
            return EnergyCounter(telem, register.joules_per_count, _PMT_COUNTS, _NPU_WATTS, register.offset)
        unknown.append(f"{guid:#x}")
    if unknown:
        return f"no telemetry region is known here: {', '.join(unknown)}"
    return f"no telemetry in {pmt}: the kernel needs intel_pmt_telemetry"


def _package_counter(powercap: Path) -> EnergyCounter | str:
    for zone in sorted(powercap.glob("intel-rapl:[0-9]")):
        try:
            if (zone / "name").read_text().startswith("package"):
                counts = int((zone / "max_energy_range_uj").read_bytes()) + 1
                return EnergyCounter(zone / "energy_uj", 1e-6, counts, _PACKAGE_WATTS)
        except (OSError, ValueError):
            continue
    return f"no package's counter in {powercap}: the kernel needs intel_rapl_msr"


@dataclass(frozen=True, slots=True)
class PowerSource:
    """What supplies the machine: "AC", "battery", or None where the kernel does not say.

    `adapter_watts` is what the adapter can give; None where the kernel does not know it, as of most without USB-C.
    `discharging`: the battery is used, which with an adapter says that this is too weak.
    """

    source: Literal["AC", "battery"] | None
    adapter_watts: float | None = None
    discharging: bool = False


def power_source(sysfs: Path | None = None) -> PowerSource:
    batteries, adapters = [], []
    for supply in sorted(((sysfs or SYSFS) / "power_supply").glob("*")):
        if _text(supply / "scope") == "Device":
            continue  # of a mouse, or of a screen
        if _text(supply / "type") == "Battery":
            batteries.append(_text(supply / "status"))
        elif _text(supply / "online") in {"1", "2"}:
            adapters.append(_adapter_watts(supply))
    discharging = "Discharging" in batteries
    if adapters:
        return PowerSource("AC", max((watts for watts in adapters if watts), default=None), discharging)
    return PowerSource("battery" if batteries else None, discharging=discharging)


def _adapter_watts(supply: Path) -> float | None:
    """By the limit of the input, else by the largest voltage and current; the files hold millionths."""
    try:
        limit = supply / "input_power_limit"
        if limit.exists():
            watts = int(limit.read_bytes()) / 1e6
        else:
            watts = int((supply / "voltage_max").read_bytes()) * int((supply / "current_max").read_bytes()) / 1e12
    except (OSError, ValueError):
        return None
    return round(watts, 1) if 1 <= watts <= _MOST_ADAPTER_WATTS else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
