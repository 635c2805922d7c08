"""Engines that stand while a chat has its turn on the CPU: killed, cancelled, looked at and ended meanwhile.

Scripted engines in real processes; the test gives the turns.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from tests.faults.engines.test_engine_faults import QUICK, collect, no_canary, spec, until
from worker_node.core.errors import DeadlineExceeded, Retryable
from worker_node.engines.cpu_share import CpuPlace, CpuRole, CpuTurns
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.engines.watchdog import LivenessLimits, stopped


class Turns(CpuTurns):
    """The next turn comes when the test says so; a chat goes on all the time."""

    def __init__(self):
        self.timers = []
        super().__init__(0.5, later=self._note)
        self.seat(CpuRole.FIRST).began(SimpleNamespace(id=1, deadline=1e12, interactive=True))

    def _note(self, _delay, call):
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: self.timers.remove(call) if call in self.timers else None)

    def next(self):
        """End the turn."""
        self.timers.pop()()


@asynccontextmanager
async def yielding(**options):
    """An engine that stands with a job in it, which goes on for a second at least, and its turns."""
    turns = Turns()
    limits = EngineLimits(liveness=LivenessLimits(20.0), restart=QUICK)
    engine = SupervisedEngine(spec(**options), no_canary, limits, cpu=CpuPlace(turns, CpuRole.YIELDS))
    engine.start()
    try:
        yield engine, turns
    finally:
        await engine.stop()


async def standing(engine, turns, *tokens, seconds=1e12):
    """A task that waits for an answer of an engine that stands."""
    await until(engine, EngineState.READY)
    task = asyncio.create_task(collect(engine, *tokens, deadline=time.monotonic() + seconds))
    async with asyncio.timeout(60):
        while not turns.timers:
            await asyncio.sleep(0)
        turns.next()
        while not stopped(engine.status.pid):
            await asyncio.sleep(0.001)
    return task


async def test_an_engine_that_stands_goes_on_where_it_was():
    async with yielding(step_s=0.01) as (engine, turns):
        answer = await standing(engine, turns, *range(1, 100))
        turns.next()
        assert await answer == list(range(1, 100))
        assert not turns.timers, "nobody waits for a turn any more"
        assert engine.status.restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_an_engine_that_dies_while_it_stands_fails_what_it_held_at_once_and_comes_back(number):
    async with yielding(step_s=0.01) as (engine, turns):
        answer = await standing(engine, turns, *range(1, 100))
        os.kill(engine.status.pid, number)
        if number == signal.SIGSEGV:
            turns.next()  # it takes the signal when it goes on
        with pytest.raises(Retryable):
            await answer
        assert not turns.timers
        await until(engine, EngineState.STARTING, EngineState.BACKING_OFF)
        await until(engine, EngineState.READY)
        assert not stopped(engine.status.pid)


async def test_a_deadline_passes_while_the_engine_stands():
    async with yielding(step_s=0.01) as (engine, turns):
        answer = await standing(engine, turns, *range(1, 400), seconds=1.0)
        with pytest.raises(DeadlineExceeded):
            await answer
        assert not turns.timers
        assert await collect(engine, 5, 6) == [5, 6], "it goes on to hear of the next"


async def test_what_stands_does_not_hang():
    async with yielding(step_s=0.01) as (engine, turns):
        answer = await standing(engine, turns, *range(1, 100))
        process = engine._process
        later = time.monotonic() + 1000.0

        def looks(now):
            # The first that comes late is excused.
            return [process._liveness.look(now)[0] for _ in range(2)]

        assert looks(process._seat.ran_until(later)) == [None, None]
        assert looks(later)[1] is not None
        turns.next()
        await answer


async def test_a_node_that_stops_does_not_wait_for_an_engine_that_stands():
    async with yielding(step_s=0.01) as (engine, turns):
        answer = await standing(engine, turns, *range(1, 100))
        process = engine._process
        await engine.stop()
        assert process._process.returncode == 0, "it was asked to end, and not killed"
        with pytest.raises(Retryable):
            await answer
