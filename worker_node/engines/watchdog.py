"""Whether an engine process still makes progress, and what ended it. Pure: the caller supplies time and readings.

Every event of an engine proves that it is alive. Before a native call it announces the call's size and then stays
silent until the call returns, so it gets the time that calls of this size are known to take. Runs that proceed while
the loop sends heartbeats are judged by the age of the oldest one, which each heartbeat reports."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from worker_node.devices.memory import KERNEL, MemoryReader

# A call may take this many times as long as the slowest known one of its size: other load on the machine slows it down.
_MARGIN = 4.0
# A slow call is forgotten in time: each faster call of its size takes this much off.
_FADE = 0.95
# A look that comes later than this finds events unread, since the edge process itself did not run.
_LATE_S = 0.5
_LOOK_S = 1.0
# Between looks at an engine without a known run or call: only silence counts, which is allowed for longer.
_IDLE_LOOK_S = 5.0


@dataclass(slots=True)
class CallTimes:
    """The time of native calls, learned from those that returned, by kind and by size in powers of two."""

    _slowest: dict[str, dict[int, float]] = field(default_factory=dict)

    def learn(self, stage: str, units: int, seconds: float) -> None:
        """Record that a call of `units` took `seconds`."""
        known = self._slowest.setdefault(stage, {})
        size = units.bit_length()
        known[size] = max(seconds, known.get(size, 0.0) * _FADE)

    def expected(self, stage: str, units: int) -> float | None:
        """Seconds that a call of `units` may be expected to take at most; None when none of its kind returned yet.

        From smaller calls it is extrapolated quadratically, as attention grows.
        """
        known = self._slowest.get(stage, {})
        size = units.bit_length()
        larger = [known[other] for other in known if other >= size]
        if larger:
            return known.get(size, min(larger))
        return max((seconds * 4.0 ** (size - other) for other, seconds in known.items()), default=None)


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Seconds: the silence that is allowed outside of announced calls, and the longest that a call or run may take."""

    watchdog_s: float = 30.0
    run_timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class _Call:
    stage: str
    units: int
    since: float


@dataclass(slots=True)
class Liveness:
    """Judges one life of an engine process, which begins at `now`."""

    limits: LivenessLimits
    times: CallTimes
    now: float
    _heard: float = field(init=False)
    _due: float = field(init=False)
    _call: _Call | None = None
    _run: tuple[int, float] | None = None
    _excused: bool = False

    def __post_init__(self) -> None:
        self._heard = self._due = self.now

    def heard(self, now: float) -> None:
        """Record an event of the engine: a call that it had announced has returned."""
        self._heard = now
        if self._call is not None:
            self.times.learn(self._call.stage, self._call.units, max(0.0, now - self._call.since))
            self._call = None

    def called(self, stage: str, units: int, now: float) -> None:
        """Record that the engine entered a native call of `units`; it stays silent until the call returns."""
        self.heard(now)
        self._call = _Call(stage, units, now)

    def beat(self, oldest: tuple[int, float] | None, last: tuple[int, float] | None) -> None:
        """Record a heartbeat: the oldest active run and the last finished one, each as (units, seconds)."""
        self._run = oldest
        if last is not None:
            self.times.learn("run", *last)

    def allowed(self, stage: str, units: int) -> float:
        """Seconds that a call or run of this size may take; the longest time while none like it has returned."""
        longest = max(self.limits.watchdog_s, self.limits.run_timeout_s)
        expected = self.times.expected(stage, units)
        return longest if expected is None else min(longest, max(self.limits.watchdog_s, _MARGIN * expected))

    def look(self, now: float) -> tuple[str | None, float]:
        """Return why the engine counts as hung (None: it does not), and in how many seconds to look again.

        After a look that came late (the node was stopped, or its loop was held up) the engine is given until the next
        one: what it sent meanwhile has not been read.
        """
        late = now - self._due > _LATE_S
        reason, left = self._judge(now)
        if reason is not None and late and not self._excused:
            reason, left = None, _LOOK_S
            self._excused = True
        else:
            self._excused = False
        pause = min(_LOOK_S if self._run or self._call or reason else _IDLE_LOOK_S, left)
        self._due = now + pause
        return reason, pause

    def _judge(self, now: float) -> tuple[str | None, float]:
        if self._run is not None:
            units, age = self._run
            allowed = self.allowed("run", units)
            if age >= allowed:
                return f"hung: a run of {units} tokens has not ended within {allowed:.0f} s", 0.0
        call = self._call
        if call is None:
            left = self._heard + self.limits.watchdog_s - now
            return (f"hung: no heartbeat for {now - self._heard:.0f} s" if left <= 0 else None), left
        allowed = self.allowed(call.stage, call.units)
        left = call.since + allowed - now
        if left <= 0:
            return f"hung: {call.stage} of {call.units} tokens did not return within {allowed:.0f} s", left
        return None, left


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
    """Judges one load that begins at `now`: a process that does nothing for `limit_s` seconds hangs.

    By the kernel's figures, since a process that loads sends no events: a cold compile for an NPU takes minutes and
    computes all the time; a process that is stopped or sleeps does not.
    """

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
        return f"hung: it has not computed anything for {self._quiet_s:.0f} s"


def _stat(path: Path) -> list[str] | None:
    try:
        # The name is in parentheses and may hold anything.
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


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
    """Readings of one engine process while it lives, and the verdict when it has ended.

    A request that breaks its engine ends it by a signal such as SIGSEGV or SIGABRT, by an exit status, or by the memory
    that it takes: then the kernel or a daemon sends SIGKILL, too.
    """

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
