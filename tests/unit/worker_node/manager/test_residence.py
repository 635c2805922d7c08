"""How long a model stays in memory, in virtual time."""

import asyncio
from types import SimpleNamespace

import pytest

from worker_node.engines.base import EngineState, EngineStatus
from worker_node.manager.activity import Activity
from worker_node.manager.residence import Residence


class Time:
    """A clock that moves only when told, and wakes who slept long enough."""

    def __init__(self):
        self.now = 0.0
        self._sleepers = []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    async def advance(self, seconds):
        """Move on, stopping wherever somebody wakes."""
        end = self.now + seconds
        await settle()
        while due := sorted((s for s in self._sleepers if s[0] <= end and not s[1].done()), key=lambda s: s[0]):
            self.now, woken = due[0]
            woken.set_result(None)
            await settle()
        self.now = end


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Engine:
    def __init__(self):
        self.state = EngineState.READY
        self.woken = 0

    @property
    def status(self):
        return EngineStatus(self.state)

    def wake(self):
        self.woken += 1
        self.state = EngineState.STARTING

    async def unload(self):
        self.state = EngineState.UNLOADED
        return True


class Case:
    def __init__(self):
        self.time = Time()
        self.engine = Engine()
        self.model = SimpleNamespace(
            id="m", placements=[SimpleNamespace(engine=self.engine)], activity=Activity(self.time.clock)
        )
        self.residence = Residence(self.time.clock, self.time.sleep)

    @property
    def loaded(self):
        return self.engine.state is not EngineState.UNLOADED


@pytest.fixture
async def case():
    made = Case()
    yield made
    await made.residence.close()


async def test_a_model_is_unloaded_when_it_was_idle_for_so_long(case):
    case.residence.keep(case.model, 60)
    await case.time.advance(59)
    assert case.loaded
    assert case.residence.expires_in(case.model) == 1
    await case.time.advance(2)
    assert not case.loaded
    assert case.residence.expires_in(case.model) is None


async def test_the_time_counts_from_the_end_of_the_last_request(case):
    case.residence.keep(case.model, 60)
    await case.time.advance(30)
    with case.model.activity.working():
        await case.time.advance(100)
        assert case.residence.expires_in(case.model) == 60, "in use: the time has not begun"
        with case.model.activity.working():
            await case.time.advance(10)
        await case.time.advance(10)
    await case.time.advance(59)
    assert case.loaded, "it became idle 59 s ago and stays for 60"
    await case.time.advance(1)
    assert not case.loaded


async def test_a_later_wish_replaces_the_earlier_one(case):
    case.residence.keep(case.model, 10)
    case.residence.keep(case.model, None)
    await case.time.advance(1000)
    assert case.loaded
    case.residence.keep(case.model, 0)
    await case.time.advance(0)
    assert not case.loaded


async def test_a_model_in_use_or_being_loaded_is_unloaded_afterwards(case):
    with case.model.activity.working():
        case.engine.state = EngineState.STARTING
        await case.residence.unload(case.model)
        await case.time.advance(100)
        assert case.loaded
    await case.time.advance(5)
    assert case.engine.state is EngineState.STARTING
    case.engine.state = EngineState.READY
    await case.time.advance(1)
    assert not case.loaded
