"""How much energy a device used, by the kernel's cumulative counters.

The NPU's counter is a register of Intel's Platform Monitoring Technology (PMT). Where it is depends on the processor,
which the region's GUID names; a region with an unknown GUID is not read. CPU and GPU share the counter of the
processor's package (RAPL), which counts all that runs there, the NPU too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker_node.core.types import Device

PMT_CLASS = Path("/sys/class/intel_pmt")
POWERCAP_CLASS = Path("/sys/class/powercap")

# The counter has 32 bits, 14 of them after the point of a joule; on Wildcat Lake one count is a hundred times as much.
_PMT_COUNTS = 1 << 32
_PMT_JOULES = 1 / (1 << 14)


@dataclass(frozen=True, slots=True)
class Register:
    """Where a processor's PMT region holds the energy of its NPU."""

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
    """A counter that begins again at 0 after `counts`.

    `offset` is the place of its 4 bytes in a binary file; None for a file that holds a decimal number.
    """

    path: Path
    joules_per_count: float
    counts: int
    offset: int | None = None

    def read(self) -> int | None:
        """The count now; None where it cannot be read."""
        try:
            if self.offset is None:
                return int(self.path.read_bytes())
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                found = file.read(4)
        except (OSError, ValueError):
            return None
        return int.from_bytes(found, "little") if len(found) == 4 else None

    def joules(self, before: int | None, after: int | None) -> float | None:
        """The energy between two reads less than one round of the counter apart; None where a read failed."""
        if before is None or after is None:
            return None
        return (after - before) % self.counts * self.joules_per_count


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """No counter can be read, and why."""

    reason: str


def energy_counter(
    device: Device, *, emulated: bool = False, pmt: Path = PMT_CLASS, powercap: Path = POWERCAP_CLASS
) -> EnergyCounter | Unmeasured:
    """The counter of a device on this machine, which was read once."""
    if emulated:
        return Unmeasured("the NPU is emulated")
    found = _npu_counter(pmt) if device is Device.NPU else _package_counter(powercap)
    if isinstance(found, EnergyCounter) and found.read() is None:
        return Unmeasured(f"{found.path} cannot be read by this user")
    return found


def _npu_counter(pmt: Path) -> EnergyCounter | Unmeasured:
    unknown = []
    for region in sorted(pmt.glob("telem*")):
        try:
            guid = int((region / "guid").read_text(), 16)
        except (OSError, ValueError):
            continue
        if (register := REGISTERS.get(guid)) is not None:
            return EnergyCounter(region / "telem", register.joules_per_count, _PMT_COUNTS, register.offset)
        unknown.append(f"{guid:#x}")
    if unknown:
        return Unmeasured(f"no telemetry region is known here: {', '.join(unknown)}")
    return Unmeasured(f"no telemetry in {pmt}: the kernel needs intel_pmt_telemetry")


def _package_counter(powercap: Path) -> EnergyCounter | Unmeasured:
    for zone in sorted(powercap.glob("intel-rapl:[0-9]")):
        try:
            if (zone / "name").read_text().startswith("package"):
                counts = int((zone / "max_energy_range_uj").read_bytes()) + 1
                return EnergyCounter(zone / "energy_uj", 1e-6, counts)
        except (OSError, ValueError):
            continue
    return Unmeasured(f"no package's counter in {powercap}: the kernel needs intel_rapl_msr")
