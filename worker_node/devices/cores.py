"""Processor cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from worker_node.devices.kernel_files import read_kernel_file

_CPUS = Path("/sys/devices/system/cpu")


def usable_cores(cpus: Path = _CPUS) -> int:
    """Cores of this process's affinity mask; threads of one core count as one, if the kernel tells."""
    return len({_siblings(cpus, cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpus: Path, cpu: int) -> bytes:
    try:
        return read_kernel_file(f"{cpus}/cpu{cpu}/topology/thread_siblings_list")
    except OSError:
        return b"%d" % cpu
