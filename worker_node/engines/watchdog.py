"""Whether an engine process still makes progress, and what ended it. Pure but for `stopped`: the caller supplies time.

Every event of an engine proves that it is alive. Before a native call it announces the call's size and then stays
silent until the call returns, so it gets a time by that size; the first of its kind, which may compile, gets the
longest time. Runs that proceed while the loop sends heartbeats are judged by the age of the oldest, which each
heartbeat reports."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto

import psutil

from worker_node.core.operating_system import ENDED_BY_OTHERS
from worker_node.engines.protocol import NativeCall

# Seconds that a load may take. A large speech model was seen to compile for more than 11 minutes on an NPU, on an idle
# machine (docs/npu-facts.md).
LOAD_TIMEOUT_S = 1800.0
# What a token of a call or run may take on the slowest device that is usable, busy with other work besides.
_SLOWEST_TOKEN_S = 0.1
# A look that comes later than this finds events unread, since the edge process itself did not run.
_LATE_S = 0.5
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Seconds: the silence that is allowed outside of announced calls, and the longest that a call or run may take."""

    watchdog_s: float = 30.0
    run_timeout_s: float = 180.0


@dataclass(slots=True)
class Liveness:
    """Judges one life of an engine process, which begins at `now`.

    The last event came at `heard_at`; the `call` is what it announced, if that was a native call. The oldest active
    `run`, as (units, seconds), is that of the last heartbeat; `ran`: one has ended before.
    """

    limits: LivenessLimits
    now: float
    heard_at: float = field(init=False)
    call: NativeCall | None = None
    run: tuple[int, float] | None = None
    ran: bool = False
    _due: float = field(init=False)
    _excused: bool = False

    def __post_init__(self) -> None:
        self.heard_at = self._due = self.now

    def allowed(self, units: int, *, first: bool) -> float:
        """Seconds that a call or run of this size may take; the first of its kind may compile."""
        longest = max(self.limits.watchdog_s, self.limits.run_timeout_s)
        expected = self.limits.watchdog_s + _SLOWEST_TOKEN_S * units
        return longest if first else min(longest, expected)

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
        pause = min(_LOOK_S, left)
        self._due = now + pause
        return reason, pause

    def _judge(self, now: float) -> tuple[str | None, float]:
        if self.run is not None:
            units, age = self.run
            allowed = self.allowed(units, first=not self.ran)
            if age >= allowed:
                return f"hung: a run of {units} tokens has not ended within {allowed:.0f} s", 0.0
        call = self.call
        if call is None:
            left = self.heard_at + self.limits.watchdog_s - now
            return (f"hung: no heartbeat for {now - self.heard_at:.0f} s" if left <= 0 else None), left
        allowed = self.allowed(call.units, first=call.first)
        left = self.heard_at + allowed - now
        if left <= 0:
            return f"hung: {call.stage} of {call.units} tokens did not return within {allowed:.0f} s", left
        return None, left


def stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal or a debugger: no request does that."""
    try:
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    except psutil.Error:
        return False


# Windows' statuses of crashes, as 0xC0000005 for an access violation, are looked up by their hexadecimal form.
_NTSTATUS_ERROR = 0xC0000000


class Blame(Enum):
    """Who ended a process: `NODE` itself, somebody `OUTSIDE` of it, or one `REQUEST` that was alone on the engine."""

    UNKNOWN = auto()
    NODE = auto()
    OUTSIDE = auto()
    REQUEST = auto()


@dataclass(frozen=True, slots=True)
class Death:
    """Why a process ended, for people, and who is to blame."""

    reason: str
    blame: Blame = Blame.UNKNOWN


def cause_of_death(status: int | None, *, out_of_memory: bool) -> Death:
    """What ended a process, by its exit status (negative: the signal; None: it is not known).

    `out_of_memory`: the kernel has killed a process for lack of memory moments before, most likely this one, and for
    what a request made it take. Other requests that break their engine end it by another signal or an exit status.
    """
    if status not in ENDED_BY_OTHERS:
        return Death("the engine process died" + _how(status))
    if out_of_memory:
        return Death(f"the engine process was killed{_how(status)}: the kernel has killed for lack of memory")
    return Death("the engine process was killed from outside" + _how(status), Blame.OUTSIDE)


def _how(status: int | None) -> str:
    if status is None:
        return ""
    if status >= _NTSTATUS_ERROR:
        return f" (exit status 0x{status:X})"
    if status >= 0:
        return f" (exit status {status})"
    try:
        return f" ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal has no name
        return f" (signal {-status})"
