"""When an engine that ended is started again. Pure: the caller supplies the time.

Backoff doubles from `first_backoff_s` to `max_backoff_s`. `crash_limit` crashes within `crash_window_s` quarantine the
engine for `quarantine_s`. A kill from outside does not count as a crash: it only backs off, starting over if the engine
had served for `kill_window_s`. After a quarantine the engine gets one attempt: another crash, before it has served for
`crash_window_s`, quarantines it again. Serving for that long clears its history."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

# More overflow a float, and any limit is reached by then.
_DOUBLINGS = 100


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Seconds, and how many crashes are too many.

    The window is long, because an engine that takes a minute to load and crashes soon after must be quarantined too.
    """

    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 600.0
    quarantine_s: float = 300.0
    kill_window_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RestartVerdict:
    """Start again after `delay` seconds; `quarantined` says that this is a quarantine and not a backoff."""

    delay: float
    quarantined: bool
    reason: str


@dataclass(slots=True)
class RestartPolicy:
    """The crash history of one engine."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    _crashes: deque[float] = field(default_factory=deque)
    _on_probation: bool = False
    _kills: int = 0

    def crashed(self, now: float, reason: str, *, served_s: float = 0.0) -> RestartVerdict:
        """Record a crash at `now`, `served_s` seconds after the engine became ready (0: it never did)."""
        limits = self.limits
        if served_s >= limits.crash_window_s:
            self._crashes.clear()
            self._on_probation = False
        if self._on_probation:
            return self._quarantine(f"it crashed again after a quarantine: {reason}")
        self._crashes.append(now)
        while now - self._crashes[0] > limits.crash_window_s:
            self._crashes.popleft()
        count = len(self._crashes)
        if count >= limits.crash_limit:
            return self._quarantine(f"{count} crashes within {limits.crash_window_s:.0f} s, the last: {reason}")
        return RestartVerdict(self._backoff(count), quarantined=False, reason=reason)

    def killed(self, reason: str, *, served_s: float) -> RestartVerdict:
        """Record a kill from outside, `served_s` seconds after the engine became ready (0: it never did).

        An operator killed it, or a daemon that needs memory and will kill again. Neither shows that the engine cannot
        serve.
        """
        self._kills = 1 if served_s >= self.limits.kill_window_s else self._kills + 1
        return RestartVerdict(self._backoff(self._kills), quarantined=False, reason=reason)

    def blameless(self, reason: str, *, pardons: int = 0) -> RestartVerdict:
        """One request is to blame for the end, not the engine: start again soon, and count nothing.

        The request is now known for so many of the last crashes that were counted, too.
        """
        for _ in range(min(pardons, len(self._crashes))):
            self._crashes.pop()
        return RestartVerdict(self.limits.first_backoff_s, quarantined=False, reason=reason)

    def distrusted(self, reason: str) -> RestartVerdict:
        """Quarantine at once an engine that answers wrongly: a restart would not change its answers."""
        return self._quarantine(reason)

    def _backoff(self, count: int) -> float:
        limits = self.limits
        return min(limits.max_backoff_s, limits.first_backoff_s * 2.0 ** min(count - 1, _DOUBLINGS))

    def _quarantine(self, reason: str) -> RestartVerdict:
        self._crashes.clear()
        self._on_probation = True
        return RestartVerdict(self.limits.quarantine_s, quarantined=True, reason=reason)


# When an engine process is replaced because its memory grows: pure, the clock and the readings are the caller's.
#
# Runtimes keep what they compile for a request, such as the grammar of a schema, for the life of the process. Past
# `growth` bytes the process gets a successor: beside it where memory allows two, else as soon as it is idle. Past twice
# that it gets no more requests and ends soon.

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
