"""When an engine that ended is started again. Pure: the caller supplies the time.

Backoff doubles from `first_backoff_s` to `max_backoff_s`. `crash_limit` crashes within `crash_window_s` quarantine the
engine for `quarantine_s`. A kill from outside does not count as a crash: it only backs off, starting over if the engine
had served for `kill_window_s`. After a quarantine the engine gets one attempt: another crash, before it has served for
`crash_window_s`, quarantines it again. Serving for that long clears its history."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from worker_node.engines.protocol import EngineState


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Seconds. The window is long: an engine that loads for a minute and crashes soon is quarantined, too."""

    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 600.0
    quarantine_s: float = 300.0
    kill_window_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Pause:
    """What comes before the next process: the state of the engine, why, and for how many seconds."""

    state: EngineState
    reason: str
    seconds: float


@dataclass(slots=True)
class RestartPolicy:
    """The crash history of one engine."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    _crashes: deque[float] = field(default_factory=deque)
    _on_probation: bool = False
    _kills: int = 0

    def crashed(self, now: float, reason: str, *, served_s: float = 0.0) -> Pause:
        """Record a crash, `served_s` seconds after the engine became ready (0: it never did)."""
        limits = self.limits
        if served_s >= limits.crash_window_s:
            self._crashes.clear()
            self._on_probation = False
        if self._on_probation:
            return self.quarantine(f"it crashed again after a quarantine: {reason}")
        self._crashes.append(now)
        while now - self._crashes[0] > limits.crash_window_s:
            self._crashes.popleft()
        count = len(self._crashes)
        if count >= limits.crash_limit:
            return self.quarantine(f"{count} crashes within {limits.crash_window_s:.0f} s, the last: {reason}")
        return Pause(EngineState.BACKING_OFF, reason, self._backoff(count))

    def killed(self, reason: str, *, served_s: float) -> Pause:
        """Record a kill from outside, `served_s` seconds after the engine became ready (0: it never did).

        An operator killed it, or a daemon that needs memory and will kill again. Neither shows that the engine cannot
        serve.
        """
        self._kills = 1 if served_s >= self.limits.kill_window_s else self._kills + 1
        return Pause(EngineState.BACKING_OFF, reason, self._backoff(self._kills))

    def blameless(self, reason: str) -> Pause:
        """A suspect ended the engine: count nothing, nor the crash that made it a suspect."""
        if self._crashes:
            self._crashes.pop()
        return Pause(EngineState.BACKING_OFF, reason, self.limits.first_backoff_s)

    def _backoff(self, count: int) -> float:
        # More than 100 doublings overflow a float, and any limit is reached by then.
        return min(self.limits.max_backoff_s, self.limits.first_backoff_s * 2.0 ** min(count - 1, 100))

    def quarantine(self, reason: str) -> Pause:
        """Quarantine at once, as for an engine that answers wrongly: a restart would not change its answers."""
        self._crashes.clear()
        self._on_probation = True
        return Pause(EngineState.QUARANTINED, reason, self.limits.quarantine_s)


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Bytes and seconds. Runtimes keep what they compile for a request, such as a grammar, for the life of the process.

    So a process that has grown by `growth` since it was ready is restarted as soon as it is idle, and one that has
    grown by twice as much gets no more requests and `drain_s` for those that it has. None: never. It is looked at every
    `look_s`.
    """

    growth: int | None = None
    look_s: float = 1.0
    drain_s: float = 10.0

    def replacement(self, grown: int, *, idle: bool) -> str | None:
        """How to replace a process that has grown by `grown` bytes: `idle`, `forced`; None: not now."""
        if self.growth is None or grown < self.growth:
            return None
        if idle:
            return "idle"
        return "forced" if grown >= 2 * self.growth else None


def default_growth(total: int) -> int:
    """An eighth of the machine's memory, at least 1 GiB and at most 8."""
    return max(2**30, min(8 * 2**30, total // 8))
