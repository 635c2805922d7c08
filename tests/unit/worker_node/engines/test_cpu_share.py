"""Turns of engines on the CPU beside a chat, over a clock that the test sets. Processes are what they were sent."""

import heapq
import itertools
import random
import signal
from types import SimpleNamespace

import pytest

from worker_node.engines.cpu_share import BURST_S, TURN_S, CpuRole, CpuTurns

SHARE = 0.2


class Time:
    """A clock with timers."""

    def __init__(self):
        self.now = 100.0
        self._due = []
        self._numbers = itertools.count()

    def later(self, delay, call):
        entry = SimpleNamespace(call=call, cancelled=False)
        entry.cancel = lambda: setattr(entry, "cancelled", True)
        heapq.heappush(self._due, (self.now + delay, next(self._numbers), entry))
        return entry

    def run(self, seconds, look=lambda _dt: None):
        """Let time pass; `look` is called with each stretch in which nothing changes."""
        end = self.now + seconds
        while True:
            nearest = self._due[0][0] if self._due else end
            until = min(end, nearest)
            look(until - self.now)
            self.now = until
            if nearest > end or not self._due:
                return
            _, _, entry = heapq.heappop(self._due)
            if not entry.cancelled:
                entry.call()


class Process:
    """Stands between SIGSTOP and SIGCONT."""

    def __init__(self):
        self.stands = False

    def send_signal(self, sig):
        assert self.stands == (sig == signal.SIGCONT), "a signal for nothing"
        self.stands = sig == signal.SIGSTOP


class Machine:
    def __init__(self, share=SHARE):
        self.time = Time()
        self.turns = CpuTurns(share, lambda: self.time.now, self.time.later)
        self._ids = itertools.count(1)

    def engine(self, role):
        seat = self.turns.seat(role)
        seat.process = Process()
        return seat

    def begin(self, seat, seconds=1000.0, interactive=True, since=0.0):
        job = SimpleNamespace(
            id=next(self._ids), deadline=self.time.now + seconds, interactive=interactive, since=since
        )
        seat.began(job)
        return job.id

    def ran(self, seat, seconds):
        """Seconds of the next ones in which an engine ran."""
        ran = 0.0

        def look(stretch):
            nonlocal ran
            ran += 0.0 if seat.process.stands else stretch

        self.time.run(seconds, look)
        return ran


@pytest.fixture
def machine():
    return Machine()


def test_engines_that_yield_have_their_share_of_the_time_beside_a_chat(machine):
    chat, ranker, speech = (machine.engine(role) for role in (CpuRole.FIRST, CpuRole.YIELDS, CpuRole.YIELDS))
    machine.begin(chat)
    machine.begin(ranker)
    machine.begin(speech)
    machine.time.run(1.0)
    assert machine.ran(ranker, 10.0) == pytest.approx(SHARE * 10.0, rel=0.1)
    assert not chat.process.stands
    seen = []
    machine.time.run(1.0, lambda _dt: seen.append(ranker.process.stands == speech.process.stands))
    assert all(seen), "they have the same turns: each more would take more from the chat"


def test_nothing_stands_without_a_chat(machine):
    chat, ranker = machine.engine(CpuRole.FIRST), machine.engine(CpuRole.YIELDS)
    machine.begin(ranker)
    assert machine.ran(ranker, 5.0) == pytest.approx(5.0)
    asked = machine.begin(chat)
    machine.time.run(1e-6)
    assert ranker.process.stands, "it has computed all the time, so a chat has the first turn"
    chat.ended(asked)
    assert not ranker.process.stands
    assert machine.ran(ranker, 5.0) == pytest.approx(5.0)


def test_a_request_now_and_then_is_not_slowed_down(machine):
    chat, ranker = machine.engine(CpuRole.FIRST), machine.engine(CpuRole.YIELDS)
    machine.begin(chat)
    for _ in range(20):
        machine.time.run(2.0)
        job = machine.begin(ranker)
        assert machine.ran(ranker, BURST_S) == pytest.approx(BURST_S)
        ranker.ended(job)


def test_a_request_that_has_used_a_quarter_of_its_time_is_not_slowed_down_any_more(machine):
    chat, ranker = machine.engine(CpuRole.FIRST), machine.engine(CpuRole.YIELDS)
    machine.begin(chat)
    machine.begin(ranker, seconds=10.0)
    assert machine.ran(ranker, 2.5) < 1.0
    machine.time.run(2 * TURN_S / SHARE)
    assert machine.ran(ranker, 7.0) == pytest.approx(7.0)


def test_jobs_of_one_long_request_count_from_its_begin(machine):
    chat, speech = machine.engine(CpuRole.FIRST), machine.engine(CpuRole.YIELDS)
    machine.begin(chat)
    machine.begin(speech, seconds=100.0, since=machine.time.now - 50.0)
    assert machine.ran(speech, 5.0) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("role", "interactive"), [(CpuRole.APART, True), (CpuRole.FIRST, False)], ids=["embeddings", "generation in batch"]
)
def test_other_work_slows_nobody_down_and_is_not_slowed_down(machine, role, interactive):
    other, ranker = machine.engine(role), machine.engine(CpuRole.YIELDS)
    machine.begin(other, interactive=interactive)
    machine.begin(ranker)
    assert machine.ran(ranker, 5.0) == pytest.approx(5.0)
    machine.begin(machine.engine(CpuRole.FIRST))
    assert machine.ran(other, 5.0) == pytest.approx(5.0)


def test_a_share_of_one_switches_it_off():
    machine = Machine(1.0)
    ranker = machine.engine(CpuRole.YIELDS)
    machine.begin(machine.engine(CpuRole.FIRST))
    machine.begin(ranker)
    assert machine.ran(ranker, 5.0) == pytest.approx(5.0)


def test_a_process_that_is_to_end_or_whose_job_was_cancelled_goes_on(machine):
    ranker, speech = machine.engine(CpuRole.YIELDS), machine.engine(CpuRole.YIELDS)
    machine.begin(machine.engine(CpuRole.FIRST))
    job = machine.begin(ranker)
    machine.begin(speech)
    machine.time.run(BURST_S / (1 - SHARE) + 0.01)
    assert ranker.process.stands
    assert speech.process.stands
    ranker.ended(job)
    speech.closed()
    assert not ranker.process.stands
    assert not speech.process.stands


def test_pauses_do_not_count_as_silence(machine):
    ranker = machine.engine(CpuRole.YIELDS)
    machine.begin(machine.engine(CpuRole.FIRST))
    machine.begin(ranker)
    began, before = machine.time.now, ranker.ran_until(machine.time.now)
    ran = machine.ran(ranker, 20.0)
    now = machine.time.now
    assert ranker.ran_until(now) - before == pytest.approx(ran)
    assert ranker.ran_of(now - began, now) == pytest.approx(ran)
    assert ranker.ran_of(5.0, now) == pytest.approx(SHARE * 5.0, abs=TURN_S / SHARE)
    assert machine.engine(CpuRole.YIELDS).ran_of(5.0, now) == 5.0


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_and_goes_nothing_is_left_standing(seed):
    """Random loads: what is idle runs, nobody stands without a chat, and each contended stretch has its share."""
    machine, choose = Machine(), random.Random(seed)
    seats = [machine.engine(CpuRole.FIRST) for _ in range(2)] + [machine.engine(CpuRole.YIELDS) for _ in range(3)]
    held = {seat: set() for seat in seats}
    chats, others = seats[:2], seats[2:]
    for _ in range(300):
        seat = choose.choice(seats)
        if held[seat] and choose.random() < 0.5:
            seat.ended(held[seat].pop())
        elif held[seat] and choose.random() < 0.1:
            held[seat].clear()
            seat.closed()
        else:
            held[seat].add(machine.begin(seat, choose.choice([0.5, 30.0, 1000.0])))
        machine.time.run(choose.choice([0.0, 0.001, 0.05, 1.0]))
        for other in others:
            may_stand = bool(held[other]) and any(held[chat] for chat in chats)
            assert may_stand or not other.process.stands
        assert not any(chat.process.stands for chat in chats)
    for seat in seats:
        seat.closed()
    assert not any(seat.process.stands for seat in seats)
