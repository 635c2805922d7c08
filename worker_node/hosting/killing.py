"""What ended an engine process: itself, its memory, or a kill from outside (an operator, a deployment, a test).

A request that breaks its engine ends it by a signal such as SIGSEGV or SIGABRT, by an exit status, or by the memory
that it takes: then the kernel or a daemon sends SIGKILL, too. Pure: the caller supplies the readings.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from worker_node.devices.memory import KERNEL, MemoryReader

# What others send and no request raises.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
# A death is compared with a reading that is at least so old: the newest may be younger than the kill.
_WINDOW_S = 5.0
# Daemons kill the process that takes the machine's memory before the kernel must.
_GROWTH_BYTES = 1 << 30
_LEFT_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    oom_kills: int | None
    own: int | None


@dataclass(frozen=True, slots=True)
class Death:
    """Why a process ended, for people; `from_outside` only if that is known and its memory was not the reason."""

    reason: str
    from_outside: bool = False


@dataclass(slots=True)
class KillWatch:
    """Readings of one engine process while it lives, and the verdict when it has ended."""

    memory: MemoryReader = KERNEL
    _older: _Reading | None = field(default=None, init=False)
    _newer: _Reading | None = field(default=None, init=False)
    _own: int | None = field(default=None, init=False)
    _left: int | None = field(default=None, init=False)

    def look(self, now: float, pid: int | None, *, loading: bool = False) -> None:
        """Note what the process has taken and what is left; once a second. While it is `loading` it grows anyway."""
        own = None if pid is None or loading else self.memory.own(pid)
        if own is not None:  # a process that has just ended has none
            self._own = own
        if own is not None or loading:
            self._left = self.memory.available()
        if own is not None and self._newer is not None and self._newer.own is None:
            self._older = self._newer = None  # from now on its growth is measured
        if self._newer is None or now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Reading(now, self.memory.oom_kills(), own)

    def verdict(self, status: int | None) -> Death:
        """What ended the process, by its exit status (negative: the signal; None: it is not known)."""
        if status not in _FROM_OUTSIDE:
            return Death("the engine process died" + _how(status))
        before = self._older or self._newer
        if before is None:
            return Death("the engine process was killed" + _how(status))
        grown = 0 if self._own is None or before.own is None else self._own - before.own
        if self.memory.oom_kills() != before.oom_kills:
            reason = "the kernel has killed for lack of memory"
        elif grown >= _GROWTH_BYTES:
            reason = f"its memory had just grown by {grown / 1e6:.0f} MB"
        elif self._left is not None and self._left < _LEFT_BYTES:
            reason = f"the machine had {self._left / 1e6:.0f} MB of memory left"
        else:
            return Death("the engine process was killed from outside" + _how(status), from_outside=True)
        return Death(f"the engine process was killed{_how(status)}, most likely for its memory: {reason}")


def _how(status: int | None) -> str:
    if status is None:
        return ""
    if status >= 0:
        return f" (exit status {status})"
    try:
        return f" ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal has no name
        return f" (signal {-status})"
