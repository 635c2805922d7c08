"""Whether an engine process that loads makes progress, judged by the kernel's figures, since it sends no events.

A cold compile for an NPU takes minutes and computes all the time. A process that is stopped or sleeps for ever does
not. Pure: the caller supplies the time and the readings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
# Running or ready to run, or waiting for a disk or a driver: neither says that it hangs.
_BUSY = frozenset("RD")
_STOPPED = frozenset("Tt")
# The fields of /proc/PID/stat after the name, from the state on: major page faults, user time, system time.
_STATE, _FAULTS, _USER, _SYSTEM = 0, 9, 11, 12


@dataclass(frozen=True, slots=True)
class LoadActivity:
    """A process now: `spent` grows with its CPU time and its reads from disk; `busy`: a thread of it is at work."""

    spent: int
    busy: bool


def activity_of(pid: int | None, proc: Path = _PROC) -> LoadActivity | None:
    """Read the activity of a process; None if it has ended or cannot be read."""
    process = proc / str(pid)
    fields = _stat(process / "stat")
    if pid is None or fields is None:
        return None
    spent = sum(int(fields[index]) for index in (_FAULTS, _USER, _SYSTEM))
    threads = (_stat(thread / "stat") for thread in (process / "task").glob("*"))
    return LoadActivity(spent, any(thread is not None and thread[_STATE] in _BUSY for thread in threads))


def stopped(pid: int | None, proc: Path = _PROC) -> bool:
    """Whether a process was stopped by a signal or a debugger: no request does that."""
    fields = _stat(proc / str(pid) / "stat")
    return fields is not None and fields[_STATE] in _STOPPED


@dataclass(slots=True)
class LoadWatch:
    """Judges one load that begins at `now`: a process that does nothing for `limit_s` seconds hangs."""

    limit_s: float
    now: float
    _quiet_s: float = 0.0
    _last: LoadActivity | None = None
    look_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.look_s = min(1.0, self.limit_s / 4)

    def look(self, now: float, activity: LoadActivity | None) -> str | None:
        """Return why the load counts as hung, or None. To be called every `look_s` seconds."""
        # After a longer pause (this process was stopped, or the machine slept) nothing is known of the time between.
        elapsed, self.now = min(now - self.now, 2 * self.look_s), now
        last, self._last = self._last, activity
        if activity is None or last is None or activity.busy or activity.spent != last.spent:
            self._quiet_s = 0.0
        else:
            self._quiet_s += elapsed
        if self._quiet_s < self.limit_s:
            return None
        return f"hung while loading: it has not computed anything for {self._quiet_s:.0f} s"


def _stat(path: Path) -> list[str] | None:
    try:
        # The name is in parentheses and may hold anything.
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
