"""Turns on the CPU: while chats run there, the engines of other tasks run for a share of the time only.

The threads of an inference wait for each other at every layer, so an inference that shares some of its cores is about
as slow as on the most crowded one. A lower priority does not help: it starves the other tasks, and even the little that
they run disturbs the chat. So their processes are stopped and continued in turn, and a chat has all cores meanwhile. No
request is starved: one that has used a quarter of its time is not slowed down any more."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from worker_node.core.operating_system import Stoppable, continue_process, stop_process
from worker_node.engines.protocol import Job

# Yielding processes stay stopped until they have this credit. Measured (docs/performance.md): with shorter turns the
# caches are lost too often, with longer ones all stutter.
TURN_S = 0.032
# The credit after idling, so that an occasional request is not slowed down at all.
BURST_S = 0.3
_PATIENT_SHARE = 0.25
# Ends of pauses that are remembered: more than the longest run has.
_REMEMBERED = 4096


class CpuRole(Enum):
    """Whether an engine takes precedence on the CPU, yields to those that do, or takes no part."""

    FIRST = auto()
    YIELDS = auto()
    APART = auto()


class Timer(Protocol):
    """The part of `asyncio.TimerHandle` that is used here."""

    def cancel(self) -> None: ...


class _Held(NamedTuple):
    since: float
    deadline: float


class Seat:
    """One engine process among those of the CPU, with the jobs that count, and its pauses."""

    def __init__(self, turns: CpuTurns, role: CpuRole, clock: Callable[[], float]) -> None:
        self._turns = turns
        self._role = role
        self._clock = clock
        self._jobs: dict[int, _Held] = {}
        self._stood = 0.0
        self._since: float | None = None
        # When each pause ended, and the seconds of all pauses until then.
        self._ends: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self.process: Stoppable | None = None

    @property
    def paused(self) -> bool:
        """Whether the process is stopped now."""
        return self._since is not None

    def began(self, job: Job) -> None:
        """Record that the process has the job."""
        if self._role is CpuRole.APART or (self._role is CpuRole.FIRST and not job.interactive):
            return
        # Of a request that is several jobs, when the first of them began.
        since = getattr(job, "since", 0.0) or self._clock()
        self._jobs[job.id] = _Held(since, job.deadline)
        if len(self._jobs) == 1:
            self._turns.changed(self, self._role, busy=True)

    def ended(self, job_id: int) -> None:
        """Record that the process no longer has the job."""
        if self._jobs.pop(job_id, None) is not None and not self._jobs:
            self._turns.changed(self, self._role, busy=False)

    def closed(self) -> None:
        """Record that the process has ended or is asked to end."""
        if self._jobs:
            self._jobs.clear()
            self._turns.changed(self, self._role, busy=False)

    def patient(self) -> bool:
        """Whether no request has used too much of its time."""
        now = self._clock()
        return all(now - held.since <= _PATIENT_SHARE * (held.deadline - held.since) for held in self._jobs.values())

    def pause(self) -> None:
        """Stop the process."""
        if self._since is None and self.process is not None:
            self._since = self._clock()
            stop_process(self.process)

    def resume(self) -> None:
        """Let the process continue."""
        if self._since is not None and self.process is not None:
            continue_process(self.process)
            now = self._clock()
            self._stood += now - self._since
            self._since = None
            self._ends.append((now, self._stood))

    def ran_until(self, now: float) -> float:
        """Monotonic time less all pauses: a paused process does not count as hung."""
        return now - self._stood - (0.0 if self._since is None else now - self._since)

    def ran_of(self, age: float, now: float) -> float:
        """The part of the last `age` seconds in which it ran, to the length of a pause."""
        if not self._ends and self._since is None:
            return age
        place = bisect_right(self._ends, now - age, key=lambda end: end[0])
        before = self._ends[place - 1][1] if place else 0.0
        return max(0.0, self.ran_until(now) - (now - age - before))


def _later(delay: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay, call)


class CpuTurns:
    """Gives the engines that yield `share` of the time while one that goes first has interactive jobs; 1: all of it.

    They have a common credit in seconds. It grows by `share` of each second, up to `BURST_S`, and while one of them
    computes it shrinks by that second.
    """

    def __init__(
        self,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer] = _later,
    ) -> None:
        self._share = share
        self._clock = clock
        self._later = later
        self._first: set[Seat] = set()
        self._yielding: set[Seat] = set()
        self._credit = BURST_S
        self._as_of = clock()
        self._pausing = False
        self._timer: Timer | None = None

    def seat(self, role: CpuRole) -> Seat:
        """The seat of a process that is being started."""
        return Seat(self, role if self._share < 1.0 else CpuRole.APART, self._clock)

    def changed(self, seat: Seat, role: CpuRole, *, busy: bool) -> None:
        """Record that a process got its first job, or finished its last one."""
        self._account()
        seats = self._first if role is CpuRole.FIRST else self._yielding
        (seats.add if busy else seats.discard)(seat)
        if not busy:
            # Idle: it must be able to receive commands, such as the one to end.
            seat.resume()
        if not (self._first and self._yielding):
            self._stop()
        elif self._timer is None:
            self._run()
        elif self._pausing and busy and seat in self._yielding and seat.patient():
            seat.pause()

    def _account(self) -> None:
        now = self._clock()
        computes = bool(self._yielding) and not self._pausing
        grown = (now - self._as_of) * (self._share - computes)
        self._credit, self._as_of = min(BURST_S, max(0.0, self._credit + grown)), now

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pausing = False
        for seat in self._yielding:
            seat.resume()

    def _run(self) -> None:
        """Let the yielding processes run as long as the credit lasts."""
        self._account()
        self._pausing = False
        for seat in self._yielding:
            seat.resume()
        self._timer = self._later(self._credit / (1.0 - self._share), self._pause)

    def _pause(self) -> None:
        """Stop the yielding processes until there is credit for a turn."""
        self._account()
        self._pausing = True
        for seat in self._yielding:
            if seat.patient():
                seat.pause()
        self._timer = self._later(max(0.0, TURN_S - self._credit) / self._share, self._run)


class CpuPlace(NamedTuple):
    """Creates the seats for the processes of one engine."""

    turns: CpuTurns
    role: CpuRole

    def seat(self) -> Seat:
        """A seat for a new process."""
        return self.turns.seat(self.role)


ALONE = CpuPlace(CpuTurns(), CpuRole.APART)
