"""Memory of the machine and of a process, in bytes, and cores that this process may use, as the kernel reports them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")

# As the kernel's document drm-usage-stats has them.
_FDINFO = re.compile(rb"^drm-(driver|client-id|resident-memory):\s*(\d+(?: [KM]iB)?|\w+)$", re.MULTILINE)
_UNITS = {b"KiB": 2**10, b"MiB": 2**20}


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What this process may use in `total`, and what of it is `available` now; a container's limit counts."""

    total: int
    available: int


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MachineMemory:
    """The memory of the machine, or of the control group with the least left."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for group in _groups(proc, cgroups):
        limit, used = _number(f"{group}/memory.max"), _number(f"{group}/memory.current")
        if limit is None or used is None:
            continue
        # The kernel takes back cached files before it kills anything.
        cached = _statistic(f"{group}/memory.stat", b"inactive_file") or 0
        total, available = min(total, limit), min(available, max(0, limit - used + cached))
    return MachineMemory(total, available)


def own_memory(pid: int) -> int | None:
    """Memory of a process that only it uses, swapped out or not; None if the process has ended.

    Files that are mapped, such as weights, do not count: the kernel can drop those pages at any time.
    """
    try:
        content = (_PROC / str(pid) / "status").read_bytes()
    except OSError:
        return None
    sizes = re.findall(rb"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", content, re.MULTILINE)
    # A zombie has none.
    return 1024 * sum(map(int, sizes)) if sizes else None


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Processes killed for want of memory, by the counts of machine and control groups: only growth counts."""
    files = [f"{proc}/vmstat", *(f"{group}/memory.events" for group in _groups(proc, cgroups))]
    counts = [count for path in files if (count := _statistic(path, b"oom_kill")) is not None]
    return sum(counts) if counts else None


@dataclass(frozen=True, slots=True)
class MemoryReader:
    """Reads what a process has taken, and how many were killed for it: see the functions above."""

    own: Callable[[int], int | None] = own_memory
    oom_kills: Callable[[], int | None] = oom_kills


KERNEL = MemoryReader()


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses: CPU seconds so far, bytes in RAM (mapped files included), open file descriptors."""

    cpu_s: float
    resident: int
    files: int | None


def process_use(pid: int) -> ProcessUse | None:
    """None for a process that has ended or belongs to another user, and where no file can be opened."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            files = process.num_fds() if hasattr(process, "num_fds") else None
            return ProcessUse(times.user + times.system, process.memory_info().rss, files)
    except (psutil.Error, OSError):
        return None


def resident_memory(pid: int) -> int | None:
    """Memory of a process that is in RAM now, mapped files included; None if the process has ended."""
    use = process_use(pid)
    return None if use is None else use.resident


def npu_memory(pid: int, proc: Path = _PROC) -> int | None:
    """Memory that a process holds for its work on the NPU; None where the kernel does not say, or it has none open."""
    clients: dict[bytes, int] = {}
    for path in (proc / str(pid) / "fdinfo").glob("*"):
        try:
            found = dict(_FDINFO.findall(path.read_bytes()))
        except OSError:
            continue  # closed meanwhile
        number, _, unit = found.get(b"resident-memory", b"").partition(b" ")
        if found.get(b"driver") == b"intel_vpu" and number.isdigit():
            # Copies of a descriptor are one client.
            clients[found.get(b"client-id", b"")] = int(number) * _UNITS.get(unit, 1)
    return sum(clients.values()) if clients else None


def _groups(proc: Path, cgroups: Path) -> Iterator[str]:
    """Directories of our control group and of those around it (cgroup v2)."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):
            path = line.removeprefix("0::").rstrip("/")
            while path:
                yield f"{cgroups}{path}"
                path = path.rpartition("/")[0]
            yield str(cgroups)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_bytes())
    except (OSError, ValueError):
        return None  # "max": no limit


def _statistic(path: str, name: bytes) -> int | None:
    """The value of the line `name 123` of a file."""
    try:
        found = re.search(rb"^%s (\d+)$" % name, Path(path).read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def usable_cores(cpus: Path = _CPUS) -> int:
    """Cores of this process's affinity mask; threads of one core count as one, where the kernel reports them."""
    siblings = set()
    for cpu in psutil.Process().cpu_affinity():
        try:
            siblings.add((cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
