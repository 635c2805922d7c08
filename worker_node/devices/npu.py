"""This machine's NPU, real or emulated: its counters, who uses it, and how long it was busy with a run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_node.core.operating_system import WINDOWS, lock, shared_file, unlock
from worker_node.core.types import NOT_MEASURED, Busy, Device, Energy
from worker_node.devices.energy import EnergyCounter, EnergyMeter, energy_counter

ACCEL_CLASS = Path("/sys/class/accel")
ACCEL_DEVICES = Path("/dev/accel")
NPU_DRIVER = "intel_vpu"
BUSY_TIME_FILE = "npu_busy_time_us"
# A lost device comes back by itself, or not (DRV#87 in docs/npu-facts.md).
RELOAD_DRIVER = (
    "disable and enable the NPU in Device Manager, under Neural processors"
    if WINDOWS
    else "sudo rmmod intel_vpu; sudo modprobe intel_vpu"
)
# The largest window of a language model that Intel shows on an NPU.
MOST_PROMPT_TOKENS = 16_384
# The driver marks the device idle a moment after the result is there, and both clocks are read one after the other.
TOLERANCE_US = 1_000


def find_npu(accelerators: Path = ACCEL_CLASS) -> Path:
    """The sysfs directory of the accelerator that the NPU's driver runs; its number follows the order of loading.

    Without one, the path that the only accelerator of a machine has; it does not exist, or holds no counters.
    """
    for path in sorted(accelerators.glob("accel[0-9]*")):
        with suppress(OSError):  # a device that no driver has taken
            if (path / "device" / "driver").readlink().name == NPU_DRIVER:
                return path / "device"
    return accelerators / "accel0" / "device"


def npu_users(proc: Path = Path("/proc"), device: Path | None = None) -> list[int]:
    """Ids of processes with the device (default: the NPU) open, as far as this user sees; none on Windows."""
    if not proc.is_dir():
        return []
    device = device or ACCEL_DEVICES / find_npu().parent.name
    found = []
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            targets = [link.readlink() for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is another user's
        if device in targets:
            found.append(int(process.name))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, or why there is none."""

    value: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NpuCounters:
    """The kernel's counters: cumulative µs with jobs submitted (kernel 6.11+), bytes (6.15+), MHz, cumulative µJ."""

    busy_time_us: Reading
    memory_bytes: Reading
    frequency_mhz: Reading
    max_frequency_mhz: Reading
    energy_uj: Reading


# Beyond them the driver answers EMFILE.
NPU_LIMITS = (
    "an NPU has 128 contexts and 255 doorbells, 64 and 127 for one user who is not root, and every engine takes some"
)
MAKE_ROOM = (
    "end other programs that use the NPU (sudo fuser -v /dev/accel/accel0 lists them), or serve fewer models on it"
)
_FULL = re.compile(r"EMFILE|[Tt]oo many open files|errno:? 24\b")


def with_remedy(error: str) -> str:
    """The error of an engine on the NPU, with what brings a lost device back, or makes room on a full one."""
    if "DEVICE_LOST" in error:
        return f"{error} (if the NPU does not come back by itself: {RELOAD_DRIVER})"
    if _FULL.search(error):
        return f"{error} ({NPU_LIMITS}: {MAKE_ROOM})"
    return error


def version_in(version: str, wanted: str) -> bool:
    """Whether a version, as 1.16.0.2025, is in a range, as <1.16 or 1.16: compared as far as `wanted` goes."""
    sign, bound = re.fullmatch(r"(<=|>=|<|>|)(\d.*)", wanted).groups()  # type: ignore[union-attr]  # a test reads all
    limit = [int(part) for part in re.findall(r"\d+", bound)]
    found = [int(part) for part in re.findall(r"\d+", version)][: len(limit)]
    if not found:
        return False
    return {"<": found < limit, "<=": found <= limit, ">": found > limit, ">=": found >= limit, "": found == limit}[
        sign
    ]


def read_counter(path: Path) -> Reading:
    try:
        return Reading(int(path.read_bytes()))
    except FileNotFoundError:
        what = "this kernel does not have it" if path.parent.is_dir() else f"no NPU at {path.parent}"
        if not Path("/sys").is_dir():
            what = "this system shows no counters of an NPU"
        return Reading(None, what)
    except OSError as error:
        return Reading(None, f"cannot be read: {error.strerror}")
    except ValueError:
        return Reading(None, "does not hold a number")


def _read_mhz(directory: Path, name: str, older: str) -> Reading:
    """A frequency where kernel 7.2 has it, else where the kernels before had it; these names go in 2027."""
    found = read_counter(directory / "freq" / name)
    return read_counter(directory / older) if found.value is None else found


def frequency_limits(directory: Path) -> dict[str, int | None]:
    """What bounds the NPU's frequency, in MHz; None for what the kernel or the device does not have.

    `min`, `efficient` and `max` are the device's (kernel 7.2; `max` also before), `set_min` and `set_max` what an
    administrator allows (from the NPUs 50xx on).
    """
    limits = {"max": _read_mhz(directory, "hw_max_freq", "npu_max_frequency_mhz").value}
    for name in ("hw_min", "hw_efficient", "set_min", "set_max"):
        limits[name.removeprefix("hw_")] = read_counter(directory / "freq" / f"{name}_freq").value
    return limits


# Memory and frequency are for people and monitoring: read at most once a second, as the driver's authors advise.
_READ_EVERY_S = 1.0


@dataclass(slots=True)
class NpuSource:
    """The counters of the node's NPU; engines advance a `stand_in` for the busy counter themselves."""

    emulated: bool
    busy_counter: Path
    stand_in: bool
    energy: EnergyCounter | str = "not measured"
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    _others: tuple[Reading, Reading, Reading] | None = field(default=None, init=False, repr=False, compare=False)
    _read_at: float = field(default=0.0, init=False, repr=False, compare=False)

    def read(self) -> NpuCounters:
        """The busy time now, the others at most a second old; a suspended device has the frequency 0."""
        if self.stand_in:
            nothing = Reading(None, "the NPU is emulated")
            return NpuCounters(self.busy_time(), nothing, nothing, nothing, self._energy())
        now = self.clock()
        if self._others is None or now - self._read_at >= _READ_EVERY_S:
            directory = self.busy_counter.parent
            self._others = (
                read_counter(directory / "npu_memory_utilization"),
                _read_mhz(directory, "current_freq", "npu_current_frequency_mhz"),
                _read_mhz(directory, "hw_max_freq", "npu_max_frequency_mhz"),
            )
            self._read_at = now
        return NpuCounters(self.busy_time(), *self._others, self._energy())

    def _energy(self) -> Reading:
        if isinstance(self.energy, str):
            return Reading(None, self.energy)
        count = self.energy.read()
        if count is None:
            return Reading(None, f"{self.energy.path} cannot be read")
        return Reading(round(count * self.energy.joules_per_count * 1e6))

    def busy_time(self) -> Reading:
        """The busy time alone, now: a proof needs it before and after a run."""
        return read_counter(self.busy_counter)


# An emulated NPU is OpenVINO's NPU path executed on the CPU. The busy counter that it lacks has a stand-in: a
# `shared_file`, which engines open as they would open the kernel's file.

# `NPUW_DEVICES` names one device only: with "NPU,CPU" the CPU would take over in silence. Dynamic quantisation is an
# optimisation for the real device that triples the CPU's time per token and changes neither shapes nor limits.
NPU_ON_CPU: dict[str, Any] = {
    "NPU_USE_NPUW": "YES",
    "NPUW_DEVICES": "CPU",
    "NPUW_ONLINE_PIPELINE": "NONE",
    "NPUW_DQ": "NO",
}
EMULATED_NAME = "NPU path of OpenVINO, emulated on the CPU"
_WIDTH = 20
# Always the same width, so that a reader never sees the rest of a longer number.
_NUMBER = b"%020d\n"


@contextmanager
def stand_in_counter() -> Iterator[Path]:
    with shared_file() as path:
        path.write_bytes(_NUMBER % 0)
        yield path


class StandInWriter:
    """An engine's hold on the stand-in: it adds the time that inference ran."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))

    def read(self) -> int:
        os.lseek(self._fd, 0, os.SEEK_SET)
        return int(os.read(self._fd, _WIDTH))

    def ran(self, seconds: float) -> None:
        """Add; several engines may do so at once."""
        lock(self._fd)
        try:
            count = self.read() + round(seconds * 1e6)
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, _NUMBER % count)
        finally:
            unlock(self._fd)


@contextmanager
def npu_source(directory: Path | None, *, emulated: bool, energy_sysfs: Path | None = None) -> Iterator[NpuSource]:
    """The source for as long as the block runs.

    Without a `directory` the counters are those of the accelerator whose driver is the NPU's.
    An emulated NPU has a stand-in counter, unless a `directory` is given: then its counters are read and never written.
    """
    energy = energy_counter(Device.NPU, emulated=emulated, sysfs=energy_sysfs)
    if directory is not None or not emulated:
        yield NpuSource(emulated, (directory or find_npu()) / BUSY_TIME_FILE, stand_in=False, energy=energy)
        return
    with stand_in_counter() as path:
        yield NpuSource(True, path, stand_in=True, energy=energy)


def busy_meter(counter: str | None, energy: EnergyMeter, *, stand_in: bool) -> BusyMeter:
    """The meter over the kernel's counter file or its stand-in, which raises OSError when it is gone."""
    if counter is None:
        return BusyMeter(lambda: None, energy=energy)
    if not stand_in:
        path = Path(counter)
        return BusyMeter(lambda: read_counter(path).value, energy=energy)
    writer = StandInWriter(Path(counter))
    return BusyMeter(writer.read, writer.ran, energy=energy)


@dataclass(slots=True)
class BusyMeter:
    """Measures run after run of one engine. Call `begin` before and `end` after each, `so_far` in between.

    The kernel counts for the whole device, all its users: a difference proves that the NPU worked, not that it worked
    for this engine alone. Sharing is detected when the counter moved between runs of this engine, or by more than a run
    lasted. The counter cannot show that the NPU was not shared, so this is never claimed. `read` gives the count, None
    where it cannot be read; a stand-in is told by `ran` for how many seconds more a run has lasted.
    """

    read: Callable[[], int | None]
    ran: Callable[[float], None] = lambda _seconds: None
    clock: Callable[[], float] = time.monotonic
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    _rest: int | None = None
    _before: int | None = None
    _began: float = 0.0
    _reported_until: float = 0.0
    _shared: bool = False

    def rest(self) -> None:
        """Read the counter now: its changes so far (loading, compiling) were this engine's own, and no run."""
        self._rest = self.read()

    def begin(self) -> None:
        self._before = self.read()
        self._shared = (
            self._before is not None and self._rest is not None and abs(self._before - self._rest) > TOLERANCE_US
        )
        self.energy.begin()
        self._began = self._reported_until = self.clock()

    def so_far(self) -> Busy:
        """Since `begin`; no busy time also when the counter went backwards. A run once seen to be shared stays so."""
        now = self.clock()
        energy = self.energy.so_far()
        self.ran(now - self._reported_until)
        self._reported_until = now
        count = self.read()
        if count is None or self._before is None or count < self._before:
            return Busy(None, self._shared, energy)
        us = count - self._before
        # By a clock read after the counter: held up between the two, we must not take our own run for another's.
        if us > (self.clock() - self._began) * 1e6 + TOLERANCE_US:
            self._shared = True
        return Busy(us, self._shared, energy)

    def end(self) -> Busy:
        busy = self.so_far()
        self._rest = self.read()
        return busy


# Of sums of shares: ten tenths are a little less than one.
_ROUNDING = 1e-6


@dataclass(slots=True)
class Share:
    """What one of several has of what was measured for all of them."""

    us: float | None = 0.0
    shared: bool = False
    energy: Energy = Energy(0.0)  # noqa: RUF009  (frozen)

    def add(self, busy: Busy, count: int) -> None:
        """Add an equal part of what `count` of them took together."""
        self.us = None if self.us is None or busy.us is None else self.us + busy.us / count
        self.shared |= busy.shared
        self.energy = self.energy.plus(busy.energy.part(count))

    def rounded(self) -> Busy:
        """Rounded down, or the sum of all could be more than there was."""
        return Busy(None if self.us is None else int(self.us + _ROUNDING), self.shared, self.energy)


@dataclass(slots=True)
class OverlappingRuns:
    """Divides what was measured among runs of one engine that overlap: equally among those active at the same moment.

    So all of them together claim no more than there was, and a run that had the device alone claims all of it.
    """

    meter: BusyMeter
    _active: dict[Hashable, Share] = field(default_factory=dict)

    def begin(self, run: Hashable) -> None:
        if self._active:
            self._divide()
        self.meter.begin()
        self._active[run] = Share()

    def divide(self) -> None:
        self._divide()
        self.meter.begin()

    def _divide(self) -> None:
        busy = self.meter.end()
        for share in self._active.values():
            share.add(busy, len(self._active))

    def so_far(self, run: Hashable) -> Busy:
        self.divide()
        return self._active[run].rounded()

    def end(self, run: Hashable) -> Busy:
        """What a run has taken; call it when the run has ended, or is given up."""
        if run not in self._active:
            return NOT_MEASURED
        self._divide()
        share = self._active.pop(run)
        if self._active:
            self.meter.begin()
        return share.rounded()


@dataclass(slots=True)
class Utilisation:
    """The busy share between two samples at least `shortest_s` apart; an earlier one gets the last share."""

    shortest_s: float = 1.0
    _at: float | None = None
    _count: int = 0
    _share: float | None = None

    def sample(self, count: int | None, now: float) -> float | None:
        """Return the share, 0 to 1; None before the second sample, or when the counter is unknown or went backwards."""
        if count is None:
            self._at = self._share = None
        elif self._at is None or count < self._count:
            self._at, self._count, self._share = now, count, None
        elif now - self._at >= self.shortest_s:
            self._share = min(1.0, (count - self._count) / 1e6 / (now - self._at))
            self._at, self._count = now, count
        return self._share
