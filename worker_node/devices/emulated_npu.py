"""The emulated NPU: OpenVINO's NPU path executed on the CPU, and a stand-in for the busy counter that it lacks.

The stand-in is a file in memory without a name (memfd) that the edge process holds. Engines open it through
/proc/<pid>/fd, as they would open the kernel's file; it ends with the edge process, however that ends, so nothing is
left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from worker_node.core.operating_system import lock, unlock

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


class StandInCounter:
    """The edge process's hold on the stand-in; `path` is what engines and readers open."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("npu_busy_time_us", os.MFD_CLOEXEC)
        _write(self._fd, 0)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        """Release the stand-in."""
        os.close(self._fd)


class StandInWriter:
    """An engine's hold on the stand-in (see `npu.BusyMeter`): it adds the time that inference ran.

    Raises OSError if the stand-in cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self) -> int | None:
        """Microseconds added by all engines of the node."""
        return int(os.pread(self._fd, _WIDTH, 0))

    def ran(self, seconds: float) -> None:
        """Add; several engines may do so at once."""
        lock(self._fd)
        try:
            _write(self._fd, int(os.pread(self._fd, _WIDTH, 0)) + round(seconds * 1e6))
        finally:
            unlock(self._fd)


def _write(fd: int, count: int) -> None:
    # Always the same width, so that a reader never sees the rest of a longer number.
    os.pwrite(fd, f"{count:0{_WIDTH}d}\n".encode(), 0)
