"""The node's NPU, real or emulated: where its counters are, for /health and for the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from worker_node.devices.emulated_npu import StandInCounter
from worker_node.devices.npu import BUSY_TIME_FILE, NpuCounters, find_npu, read_counters, read_number, read_stand_in


@dataclass(frozen=True, slots=True)
class NpuSource:
    """`busy_counter` is the file with the busy time; `stand_in` says that engines advance it themselves."""

    emulated: bool
    busy_counter: Path
    stand_in: bool

    def read(self) -> NpuCounters:
        """Read all counters."""
        return read_stand_in(self.busy_counter) if self.stand_in else read_counters(self.busy_counter.parent)

    def busy_time_us(self) -> int | None:
        """Read the busy time alone; None where it cannot be read."""
        return read_number(self.busy_counter)


@contextmanager
def npu_source(directory: Path | None, *, emulated: bool) -> Iterator[NpuSource]:
    """The source for as long as the block runs.

    Without a `directory` the counters are those of the accelerator whose driver is the NPU's.
    An emulated NPU has a stand-in counter, unless a `directory` is given: then its counters are read and never written.
    """
    if directory is not None or not emulated:
        yield NpuSource(emulated, (directory or find_npu()) / BUSY_TIME_FILE, stand_in=False)
        return
    counter = StandInCounter()
    try:
        yield NpuSource(True, counter.path, stand_in=True)
    finally:
        counter.close()
