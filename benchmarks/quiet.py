"""Whether other work disturbs a measurement: the CPU that other processes and other guests take from its cores.

A figure that was taken while others worked says little. So each measurement waits for a quiet machine, for a limited
time in all, and is repeated when the machine was not quiet during it; what stayed disturbed is counted and shown.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# The share of its cores that others may take.
LIMIT = 0.05
ATTEMPTS = 3
_WINDOW_S = 1.0


@dataclass(frozen=True)
class CpuReading:
    """Seconds since some beginning: of the clock, and of CPU on the benchmark's cores: all that ran, other guests, and
    the benchmark itself."""

    at: float
    busy: float
    stolen: float
    own: float


def own_cores():
    """The cores that this process, and what it starts, may run on."""
    return frozenset(os.sched_getaffinity(0))


def read_cpu(cores=None):
    """The CPU time until now of `cores` (own_cores() if None); the benchmark's own is that of this process and of all
    that it started."""
    cores = own_cores() if cores is None else cores
    busy = stolen = 0.0
    for number, times in enumerate(psutil.cpu_times(percpu=True)):
        if number in cores:
            busy += times.user + times.system + times.nice + times.irq + times.softirq
            stolen += times.steal
    this = psutil.Process()
    own = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            # Those of its children count once they have ended and were waited for.
            own += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return CpuReading(time.monotonic(), busy, stolen, own)


def disturbance(before, after, cores):
    """The share of `cores` cores (0 to 1) that others had between two readings."""
    elapsed = after.at - before.at
    if elapsed <= 0:
        return 0.0
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, others + after.stolen - before.stolen) / (cores * elapsed))


@dataclass
class QuietGuard:
    """Takes measurements on a quiet machine. It waits and repeats for `patience_s` seconds in all, then no more.

    `measured` and `disturbed` count the measurements that were kept; `worst` is the largest disturbance of those.
    """

    patience_s: float = 0.0
    limit: float = LIMIT
    cores: int = field(default_factory=lambda: len(own_cores()))
    read: Callable[[], CpuReading] = read_cpu
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    measured: int = 0
    disturbed: int = 0
    worst: float = 0.0

    async def take(self, measure):
        """Return what `measure` returns, of the least disturbed attempt."""
        best = None
        for _ in range(ATTEMPTS):
            await self._wait()
            before = self.read()
            value = await measure()
            after = self.read()
            share = disturbance(before, after, self.cores)
            if best is None or share < best[0]:
                best = share, value
            if share <= self.limit or self.patience_s <= 0:
                break
            self.patience_s -= after.at - before.at
        share, value = best
        self.measured += 1
        self.disturbed += share > self.limit
        self.worst = max(self.worst, share)
        return value

    async def _wait(self):
        """Wait until others are quiet, or the patience is used up."""
        while self.patience_s > 0:
            before = self.read()
            await self.sleep(_WINDOW_S)
            after = self.read()
            if disturbance(before, after, self.cores) <= self.limit:
                return
            self.patience_s -= after.at - before.at

    def line(self):
        """What is to be said of the machine beside the figures."""
        if not self.measured:
            return "whether the machine was quiet was not watched"
        if not self.disturbed:
            return f"quiet machine: others had at most {self.worst:.1%} of the cores in {self.measured} measurements"
        return (
            f"DISTURBED: in {self.disturbed} of {self.measured} measurements others had more than {self.limit:.0%} of "
            f"the cores (up to {self.worst:.0%}); do not quote these figures"
        )


def describe_machine(cpuinfo=Path("/proc/cpuinfo")):
    """What a figure depends on: the processor and what it can do, memory, kernel, versions, the load now."""
    import openvino

    fields = dict.fromkeys(("model name", "flags"), "")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
            fields[name.strip()] = fields[name.strip()] or value.strip()
    features = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "hypervisor")
    flags = set(fields["flags"].split())
    system = os.uname()
    return {
        "cpu": fields["model name"] or system.machine,
        "cores": len(own_cores()),
        "cores_of_machine": os.cpu_count(),
        "features": [feature for feature in features if feature in flags],
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": system.release,
        "openvino": openvino.get_version(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
