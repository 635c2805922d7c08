"""When an engine process is replaced because its memory grows: pure, the clock and the readings are the caller's.

Runtimes keep what they compile for a request, such as the grammar of a schema, for the life of the process. Past
`growth` bytes the process gets a successor: beside it where memory allows two, else as soon as it is idle. Past twice
that it gets no more requests and ends soon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

_GIB = 2**30
_HARD = 2
# A process may take more memory while it loads than when it is ready.
_LOADING = 1.25


class Recycle(StrEnum):
    """How a process is replaced; FAILED: its successor did not become ready, and it serves on."""

    BESIDE = "beside"
    IDLE = "idle"
    FORCED = "forced"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Bytes and seconds. `growth` None: processes are never replaced.

    `beside`: whether two processes can hold the device at once. `reserve` stays available while two do. The readings
    are taken every `look_s`. A process that was forced out gets `drain_s` for the requests that it runs. After a
    successor failed, the next is tried after `first_retry_s`, doubling to `max_retry_s`.
    """

    growth: int | None = None
    beside: bool = True
    reserve: int = _GIB // 2
    look_s: float = 1.0
    drain_s: float = 10.0
    first_retry_s: float = 30.0
    max_retry_s: float = 1800.0

    @property
    def hard(self) -> int | None:
        """The growth at which a process gets no more requests."""
        return None if self.growth is None else _HARD * self.growth


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A process now: its memory in bytes when it became ready (`base`) and since (`grown`).

    `available`: the machine's memory that is left; None if unknown. `idle`: it runs nothing. `loading`: its successor
    is being loaded. `retiring`: a predecessor has not finished its requests yet.
    """

    base: int
    grown: int
    available: int | None
    idle: bool
    loading: bool = False
    retiring: bool = False


@dataclass(slots=True)
class GrowthPolicy:
    """Decides for one engine, over all of its processes."""

    limits: GrowthLimits = field(default_factory=GrowthLimits)
    _failures: int = 0
    _retry_at: float | None = None

    def succeeded(self) -> None:
        """A successor serves."""
        self._failures, self._retry_at = 0, None

    def failed(self, now: float) -> float:
        """A successor did not become ready; return in how many seconds the next may be tried."""
        # 2.0 ** 64 is far over any limit; more would overflow in the end.
        wait = min(self.limits.max_retry_s, self.limits.first_retry_s * 2.0 ** min(self._failures, 64))
        self._failures += 1
        self._retry_at = now + wait
        return wait

    def outgrown(self, grown: int) -> bool:
        """Whether a process that has grown by so much is to be replaced."""
        return self.limits.growth is not None and grown >= self.limits.growth

    def decide(self, now: float, reading: MemoryReading) -> Recycle | None:
        """How to replace the process now; None: not now."""
        if not self.outgrown(reading.grown):
            return None
        hard = self.limits.hard is not None and reading.grown >= self.limits.hard
        waits = self._retry_at is not None and now < self._retry_at
        # Never a third process: a predecessor is waited for.
        if not (reading.loading or reading.retiring or waits):
            if self._fits(reading):
                return Recycle.BESIDE
            if reading.idle:
                return Recycle.IDLE
        return Recycle.FORCED if hard else None

    def _fits(self, reading: MemoryReading) -> bool:
        """Whether a successor can be loaded beside the process."""
        if not self.limits.beside or reading.available is None:
            return False
        return reading.available >= reading.base * _LOADING + self.limits.reserve


def default_growth(total: int) -> int:
    """The growth that is allowed on a machine with `total` bytes: an eighth of it, at least 1 GiB and at most 8."""
    return max(_GIB, min(8 * _GIB, total // 8))
