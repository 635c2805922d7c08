"""Which accelerator of this machine is the NPU: found by its driver, since numbers follow the order of loading."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

ACCEL_CLASS = Path("/sys/class/accel")
NPU_DRIVER = "intel_vpu"
_NAME = re.compile(r"accel([0-9]+)")


def find_npu(accelerators: Path = ACCEL_CLASS) -> Path:
    """The sysfs directory of the first accelerator that the NPU's driver runs.

    Without one, the path that the only accelerator of a machine has; it does not exist, or holds no counters.
    """
    numbered = [(int(match[1]), path) for path in _entries(accelerators) if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(numbered):
        try:
            driver = (path / "device" / "driver").readlink().name
        except OSError:
            continue  # a device that no driver has taken
        if driver == NPU_DRIVER:
            return path / "device"
    return accelerators / "accel0" / "device"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


# Files of /proc and /sys, which are read again and again while the node has nothing to do.


def read_kernel_file(path: str) -> bytes:
    """Return what the kernel says there. Raises OSError.

    Without a `Path`, a buffer and a decoder, which take longer than the kernel does.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall()


# The kernel's counters of the NPU (sysfs of intel_vpu): each field is a value, or null with the reason.

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


# Which processes hold the NPU open: whatever they do shows in the one busy counter.

ACCEL_DEVICES = Path("/dev/accel")


def npu_users(proc: Path = Path("/proc"), device: Path | None = None) -> list[int]:
    """The ids of all processes that have the device (default: the NPU) open, as far as this user may see them."""
    device = device or ACCEL_DEVICES / find_npu().parent.name
    found = []
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            targets = [link.readlink() for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is somebody else's
        if device in targets:
            found.append(int(process.name))
    return sorted(found)


# How long the NPU was busy with a run: the counter read immediately before and after it, in the engine's process.
#
# The kernel counts for the whole device, whoever uses it. So a difference proves that the NPU worked, but not that it
# worked for this engine alone. Sharing is detected when the counter moved between runs of this engine, or by more
# than a
# run lasted. The counter cannot show that the NPU was not shared, so this is never claimed.

# The driver marks the device idle a moment after the result is there, and both clocks are read one after the other.
TOLERANCE_US = 1_000


class Counter(Protocol):
    """A cumulative count of busy microseconds."""

    def read(self) -> int | None:
        """The count, or None where it cannot be read."""
        ...

    def ran(self, seconds: float) -> None:
        """Record that a run on the device lasted for `seconds` more; only a stand-in uses it."""
        ...


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy microseconds during a run (None: unknown), and whether others are known to have used the device."""

    us: int | None
    shared: bool = False


@dataclass(slots=True)
class BusyMeter:
    """Measures run after run of one engine. Call `begin` before and `end` after each, `so_far` in between."""

    counter: Counter
    clock: Callable[[], float] = time.monotonic
    _rest: int | None = None
    _before: int | None = None
    _began: float = 0.0
    _told: float = field(default=0.0)
    _shared: bool = False

    def rest(self) -> None:
        """Read the counter now: its changes so far (loading, compiling) were this engine's own, and no run."""
        self._rest = self.counter.read()

    def begin(self) -> None:
        """Start a measurement immediately before a run."""
        self._before = self.counter.read()
        self._shared = (
            self._before is not None and self._rest is not None and abs(self._before - self._rest) > TOLERANCE_US
        )
        self._began = self._told = self.clock()

    def so_far(self) -> Busy:
        """Busy time since `begin`; None also when the counter went backwards. A run once seen to be shared stays so."""
        now = self.clock()
        self.counter.ran(now - self._told)
        self._told = now
        count = self.counter.read()
        if count is None or self._before is None or count < self._before:
            return Busy(None, self._shared)
        us = count - self._before
        # By a clock read after the counter: held up between the two, we must not take our own run for another's.
        if us > (self.clock() - self._began) * 1e6 + TOLERANCE_US:
            self._shared = True
        return Busy(us, self._shared)

    def end(self) -> Busy:
        """Finish the measurement after a run."""
        busy = self.so_far()
        self._rest = self.counter.read()
        return busy


@dataclass(slots=True)
class Utilisation:
    """The share of wall time that the NPU was busy between two looks at the counter, at least `shortest_s` apart.

    Looks that follow each other faster get the last share again, so that many watchers do not disturb each other.
    """

    shortest_s: float = 1.0
    _at: float | None = None
    _count: int = 0
    _share: float | None = None

    def look(self, count: int | None, now: float) -> float | None:
        """Return the share, 0 to 1; None before the second look, or when the counter is unknown or went backwards."""
        if count is None:
            self._at = self._share = None
        elif self._at is None or count < self._count:
            self._at, self._count, self._share = now, count, None
        elif now - self._at >= self.shortest_s:
            self._share = min(1.0, (count - self._count) / 1e6 / (now - self._at))
            self._at, self._count = now, count
        return self._share
