"""Whether an engine process that was killed was killed from outside: by an operator, a deployment or a fault injection.

A request that breaks its engine ends it by a signal of its own (SIGSEGV, SIGABRT, ...), by an exit status, or by the
memory that it takes: then the kernel or a daemon kills the engine by SIGKILL, too. Pure, but for the given readings.
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


@dataclass(slots=True)
class KillWatch:
    """Readings of one engine process while it lives, and the verdict when it has ended."""

    memory: MemoryReader = KERNEL
    _older: _Reading | None = field(default=None, init=False)
    _newer: _Reading | None = field(default=None, init=False)
    _own: int | None = field(default=None, init=False)
    _left: int | None = field(default=None, init=False)

    def look(self, now: float, pid: int | None) -> None:
        """Note what the process has taken and what is left; once a second."""
        own = None if pid is None else self.memory.own(pid)
        if own is not None:  # a process that has just ended has none
            self._own, self._left = own, self.memory.available()
        if self._newer is None or now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Reading(now, self.memory.oom_kills(), own)

    def from_outside(self, status: int | None) -> bool:
        """Whether a process with this exit status (negative: the signal) was killed, and not for its memory.

        False where that is not known.
        """
        before = self._older or self._newer
        if status not in _FROM_OUTSIDE or before is None:
            return False
        if self.memory.oom_kills() != before.oom_kills:
            return False
        grown = 0 if self._own is None or before.own is None else self._own - before.own
        return grown < _GROWTH_BYTES and (self._left is None or self._left >= _LEFT_BYTES)
