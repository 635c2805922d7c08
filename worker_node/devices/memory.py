"""Memory of the machine and of a process, in bytes, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What this process may use in `total`, and what of it is `available` now; a container's limit counts."""

    total: int
    available: int


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MachineMemory | None:
    """Return the memory of the machine, or of the control group with the least left. None if it cannot be read."""
    known = _fields(proc / "meminfo")
    try:
        total, available = known["MemTotal"], known["MemAvailable"]
    except KeyError:
        return None
    for group in _groups(proc, cgroups):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is None or used is None:
            continue
        # The kernel takes back cached files before it kills anything.
        cached = _statistic(group / "memory.stat", "inactive_file") or 0
        total, available = min(total, limit), min(available, max(0, limit - used + cached))
    return MachineMemory(total, available)


def own_memory(pid: int, proc: Path = _PROC) -> int | None:
    """Memory of a process that only it uses, swapped out or not; None if the process has ended.

    Files that are mapped, such as weights, do not count: the kernel can drop those pages at any time.
    """
    known = _fields(proc / str(pid) / "status")
    try:
        return known["RssAnon"] + known["RssShmem"] + known.get("VmSwap", 0)
    except KeyError:
        return None  # not there, or a zombie, which has no memory


def available_memory() -> int | None:
    """What the machine, or our control group, has left; None if it cannot be read."""
    memory = machine_memory()
    return None if memory is None else memory.available


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """How many processes the kernel has killed for want of memory; None if it tells nowhere.

    The sum of the machine's count and those of our control groups: only whether it grows is of use.
    """
    files = [
        (proc / "vmstat", "oom_kill"),
        *((group / "memory.events", "oom_kill") for group in _groups(proc, cgroups)),
    ]
    counts = [count for count in (_statistic(path, name) for path, name in files) if count is not None]
    return sum(counts) if counts else None


@dataclass(frozen=True, slots=True)
class MemoryReader:
    """Reads what a process has taken, what is left, and how many were killed for it: see the functions above."""

    own: Callable[[int], int | None] = own_memory
    available: Callable[[], int | None] = available_memory
    oom_kills: Callable[[], int | None] = oom_kills


KERNEL = MemoryReader()


def resident_memory(pid: int, proc: Path = _PROC) -> int | None:
    """Memory of a process that is in RAM now, mapped files included; None if the process has ended."""
    try:
        with open(f"{proc}/{pid}/statm", "rb", buffering=0) as file:  # noqa: PTH123  (a path costs more than the file)
            pages = int(file.read().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Our control group and those around it (cgroup v2)."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):
            path = Path(line.removeprefix("0::/"))
            yield from (cgroups / parent for parent in (path, *path.parents))


def _fields(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file, in bytes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    parts = (line.replace(":", " ", 1).split() for line in lines)
    return {part[0]: int(part[1]) * 1024 for part in parts if len(part) == 3 and part[2] == "kB"}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # "max": no limit


def _statistic(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), None)
