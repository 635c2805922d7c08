"""When an engine that ended is started again: pure, the clock is the caller's.

Backoff doubles from `first_backoff_s` to `max_backoff_s`; `crash_limit` crashes within `crash_window_s` quarantine the
engine for `quarantine_s`, after which it gets one try. A life of `crash_window_s` without a crash forgives the rest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Seconds, and how many crashes are too many."""

    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 60.0
    quarantine_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Start again after `delay` seconds; `quarantined` says that this is a quarantine and not a backoff."""

    delay: float
    quarantined: bool
    reason: str


@dataclass(slots=True)
class RestartPolicy:
    """The crash history of one engine."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    _crashes: deque[float] = field(default_factory=deque)
    _streak: int = 0
    _last: float | None = None

    def crashed(self, now: float, reason: str) -> Verdict:
        """Record a crash at `now` and say what to do."""
        limits = self.limits
        if self._last is not None and now - self._last >= limits.crash_window_s:
            self._streak = 0
        self._last = now
        self._streak += 1
        self._crashes.append(now)
        while self._crashes and now - self._crashes[0] > limits.crash_window_s:
            self._crashes.popleft()
        if len(self._crashes) >= limits.crash_limit:
            count = len(self._crashes)
            self._crashes.clear()
            return Verdict(
                limits.quarantine_s,
                quarantined=True,
                reason=f"{count} crashes within {limits.crash_window_s:.0f} s, the last: {reason}",
            )
        delay = min(limits.max_backoff_s, limits.first_backoff_s * 2.0 ** (self._streak - 1))
        return Verdict(delay, quarantined=False, reason=reason)

    def distrusted(self, reason: str) -> Verdict:
        """It runs, but what it answers is wrong: quarantined at once, since another start would answer the same."""
        return Verdict(self.limits.quarantine_s, quarantined=True, reason=reason)
