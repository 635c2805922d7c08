"""The emulated NPU: OpenVINO's NPU path executed on the CPU, and a stand-in for the busy counter that it lacks.

The stand-in is a `shared_file`, which engines open as they would open the kernel's file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker_node.core.operating_system import lock, shared_file, unlock

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


@contextmanager
def stand_in_counter() -> Iterator[Path]:
    """The stand-in while the block runs: what engines and readers open."""
    with shared_file() as path:
        path.write_bytes(_rendered(0))
        yield path


class StandInWriter:
    """An engine's hold on the stand-in (see `npu.BusyMeter`): it adds the time that inference ran.

    Raises OSError if the stand-in cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))

    def read(self) -> int:
        """Microseconds added by all engines of the node."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return int(os.read(self._fd, _WIDTH))

    def ran(self, seconds: float) -> None:
        """Add; several engines may do so at once."""
        lock(self._fd)
        try:
            count = self.read() + round(seconds * 1e6)
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, _rendered(count))
        finally:
            unlock(self._fd)


def _rendered(count: int) -> bytes:
    # Always the same width, so that a reader never sees the rest of a longer number.
    return f"{count:0{_WIDTH}d}\n".encode()
