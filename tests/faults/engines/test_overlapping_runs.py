"""An engine of encoders that dies, fails or hangs with several runs at once: who is blamed, and who is answered."""

import asyncio
import signal

import pytest

from tests.faults.engines.rerun_model import serving
from tests.faults.engines.test_engine_faults import QUICK, until
from tests.support.overlapping_runner import RUNNER
from tests.support.scripted_runner import HANG, POISON, RAISE
from tests.support.waiting import eventually
from worker_node.core.errors import RequestBreaksEngine
from worker_node.core.types import Device
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.watchdog import LivenessLimits

LIMITS = EngineLimits(restart=QUICK, stop_timeout_s=1.0, liveness=LivenessLimits(watchdog_s=1.0, run_timeout_s=1.0))


@pytest.fixture
def blamed(monkeypatch):
    """How many requests were suspects at each death of the engine."""
    counts, died = [], Suspects.died
    monkeypatch.setattr(Suspects, "died", lambda self, keys: counts.append(len(keys)) or died(self, keys))
    return counts


def two_at_once(**how):
    return serving(Device.NPU, runner=RUNNER, npu_buckets=[16], infer_requests=2, **how)


async def sent(model, *firsts):
    """Requests of one text each, which the engine has taken in this order."""
    (engine,) = model.engines
    tasks = []
    for first in firsts:
        before = engine.status.in_flight
        tasks.append(asyncio.create_task(model.embed([first])))
        await eventually(lambda before=before: engine.status.in_flight > before)
    return tasks


def vectors(firsts):
    return [[[first, 1]] for first in firsts]


async def answers(tasks):
    return [answer.tolist() for answer in await asyncio.gather(*tasks)]


async def test_an_engine_that_dies_with_two_jobs_on_the_device_makes_these_two_suspects_and_refuses_one(blamed):
    async with two_at_once() as model:
        innocent, poisonous, *waiting = await sent(model, 1, POISON, 2, 3, 4)
        with pytest.raises(RequestBreaksEngine):
            await poisonous
        assert await answers([innocent, *waiting]) == vectors([1, 2, 3, 4])
        assert blamed == [2, 1, 1], "those that waited in the engine are not to blame"
        assert model.placements[0].admission.outstanding == 0


async def test_a_kill_from_outside_with_two_jobs_on_the_device_blames_none(blamed):
    async with two_at_once() as model:
        tasks = await sent(model, 1, 2, 3, 4)
        await model.kill(holding=2, number=signal.SIGKILL, let_go=False)
        assert await answers(tasks) == vectors([1, 2, 3, 4])
        assert blamed == []


async def test_a_run_that_fails_leaves_the_answer_of_the_other_alone_and_only_its_own_job_is_refused(blamed):
    async with two_at_once() as model:
        (engine,) = model.engines
        failing, beside, *waiting = await sent(model, RAISE, 1, 2, 3)
        assert (await beside).tolist() == [[1, 1]]
        with pytest.raises(RequestBreaksEngine):
            await failing
        assert await answers(waiting) == vectors([2, 3])
        assert blamed == [1, 1]
        await until(engine, EngineState.READY)


async def test_a_run_that_never_ends_is_found_while_others_come_and_go_beside_it(blamed):
    async with two_at_once(limits=LIMITS) as model:
        (engine,) = model.engines
        (hanging,) = await sent(model, HANG)
        first = 1
        while engine.status.restarts == 0:
            assert (await model.embed([first])).tolist() == [[first, 1]]
            first += 1
        assert first > 3, "they were answered meanwhile"
        with pytest.raises(RequestBreaksEngine):
            await hanging
        assert (await model.embed([first])).tolist() == [[first, 1]]
        assert blamed[-2:] == [1, 1]
