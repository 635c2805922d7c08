"""The kernel's counters of the NPU (sysfs of intel_vpu): each field is a value, or null with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker_node.devices.kernel_files import read_kernel_file

BUSY_TIME_FILE = "npu_busy_time_us"
_EMULATED = "the NPU is emulated"


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, or why there is none."""

    value: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NpuCounters:
    """A reading of the NPU: cumulative µs with jobs submitted (kernel 6.11+), bytes (6.15+), MHz."""

    busy_time_us: Reading
    memory_bytes: Reading
    frequency_mhz: Reading
    max_frequency_mhz: Reading


def read_counters(directory: Path) -> NpuCounters:
    """Read all counters below `directory` (of the NPU: /sys/class/accel/accel<n>/device)."""
    return NpuCounters(
        busy_time_us=read_counter(directory / BUSY_TIME_FILE),
        memory_bytes=read_counter(directory / "npu_memory_utilization"),
        frequency_mhz=read_counter(directory / "npu_current_frequency_mhz"),
        max_frequency_mhz=read_counter(directory / "npu_max_frequency_mhz"),
    )


def read_stand_in(busy_time: Path) -> NpuCounters:
    """Read the counter of an emulated NPU; an emulated device has neither memory nor a frequency of its own."""
    nothing = Reading(None, _EMULATED)
    return NpuCounters(read_counter(busy_time), nothing, nothing, nothing)


def read_counter(path: Path) -> Reading:
    """Read one counter file."""
    try:
        return Reading(int(read_kernel_file(str(path))))
    except FileNotFoundError:
        what = "this kernel does not have it" if path.parent.is_dir() else f"no NPU at {path.parent}"
        return Reading(None, what)
    except OSError as error:
        return Reading(None, f"cannot be read: {error.strerror}")
    except ValueError:
        return Reading(None, "does not hold a number")


def read_number(path: Path) -> int | None:
    """Read one counter file; None where it cannot be read. Cheaper than to find out why."""
    try:
        return int(read_kernel_file(str(path)))
    except (OSError, ValueError):
        return None


class SysfsCounter:
    """The kernel's busy counter for an engine's runs (a `busy.Counter`)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int | None:
        """Cumulative busy microseconds of the whole device; None where the kernel does not tell."""
        return read_number(self._path)

    def ran(self, seconds: float) -> None:
        """Does nothing: the kernel counts."""
