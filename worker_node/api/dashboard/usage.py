"""CPU time and memory of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from worker_node.devices.npu import read_kernel_file

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Of /proc/PID/stat, counted from what follows the name in brackets: user and system time in ticks, resident pages.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


def usage(pids: Iterable[int], proc: Path = Path("/proc")) -> tuple[float, int] | None:
    """CPU seconds and resident bytes of those of the processes that live, in all; None where there is no /proc."""
    seconds, resident, found = 0.0, 0, False
    for pid in pids:
        try:
            fields = read_kernel_file(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        found = True
        seconds += (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S
        resident += int(fields[_RESIDENT]) * _PAGE_BYTES
    return (seconds, resident) if found else None
