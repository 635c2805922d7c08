"""Requests that break their engine are found and refused; those beside them are answered."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from tests.faults.engines.rerun_model import holding, serving
from tests.faults.engines.test_engine_faults import QUICK, until
from tests.support.scripted_runner import BREAK, LATE, POISON, TAKEN
from tests.support.waiting import eventually
from worker_node.core.errors import EngineCrashed, EngineDied, RequestBreaksEngine
from worker_node.core.types import Device
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.serving.run import MAX_RUNS


@pytest.mark.parametrize("announce", [True, False], ids=["calls are announced", "they are not"])
async def test_the_request_that_kills_the_engine_is_found_and_refused_and_the_others_are_answered(tmp_path, announce):
    log = tmp_path / "log"
    async with holding(log=str(log), announce=announce, prefill_s=0.05) as model:
        # While the engine is at work on this one the others arrive, so that it takes them all up in one step.
        before = asyncio.create_task(model.answer(9))
        await eventually(lambda: "submit" in log.read_text())
        innocent = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 21)]
        poisonous = asyncio.create_task(model.answer(POISON, 1))
        await eventually(lambda: model.engines[0].status.in_flight == 22)
        model.let_go()
        with pytest.raises(RequestBreaksEngine):
            await poisonous
        assert await asyncio.gather(*innocent) == [([n, n + 1], Device.CPU) for n in range(1, 21)]
        assert await before == ([9], Device.CPU)
        deaths = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("die with")]
        assert len(deaths) <= MAX_RUNS
        assert deaths[1:] == [1, 1], "the others were taken down again"
        # The request is to blame and not the engine; sent again it costs nothing.
        await until(model.engines[0], EngineState.READY)
        with pytest.raises(RequestBreaksEngine):
            await model.answer(POISON, 1)
        assert model.engines[0].status.restarts == len(deaths)


async def test_a_request_whose_preparation_kills_the_engine_is_refused_and_the_others_run_again():
    async with serving(step_s=0.05) as model:
        innocent = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 4)]
        with pytest.raises(RequestBreaksEngine):
            await model.answer(BREAK)
        await asyncio.gather(*innocent, return_exceptions=True)
        assert model.engines[0].status.restarts == 2


async def test_requests_that_break_an_engine_do_not_quarantine_it_while_it_answers_others():
    async with serving() as model:
        for n in range(3):
            await until(model.engines[0], EngineState.READY)
            with pytest.raises(RequestBreaksEngine):
                await model.answer(POISON, n)
            await until(model.engines[0], EngineState.READY)
            assert await model.answer(n, n) == ([n, n], Device.CPU)
        assert model.engines[0].status.restarts == 6


# Of two at once so many deaths may be counted before they are told apart that the engine is quarantined (docs/npu.md):
# that they are told apart is shown here.
LIMITS = EngineLimits(restart=replace(QUICK, crash_limit=100), stop_timeout_s=1.0)


@pytest.mark.parametrize("early", [TAKEN, POISON], ids=["when it is taken", "in its first step"])
async def test_two_that_break_the_engine_at_once_are_refused_and_the_innocent_answered(early):
    async with serving(limits=LIMITS, announce=True, step_s=0.01) as model:
        (engine,) = model.engines
        whole = partial(model.answer, seconds=120.0, whole=True)
        innocent = [asyncio.create_task(whole(*range(n, n + 20))) for n in range(1, 7)]
        guilty = [asyncio.create_task(whole(first)) for first in (LATE, early)]
        ends = await asyncio.gather(*guilty, return_exceptions=True)
        assert [type(end) for end in ends] == [RequestBreaksEngine, RequestBreaksEngine]
        assert await asyncio.gather(*innocent) == [(list(range(n, n + 20)), Device.CPU) for n in range(1, 7)]
        status = await until(engine, EngineState.READY)
        assert status.restarts <= 1 + 2 * len(guilty)
        assert model.placements[0].admission.outstanding == 0


@pytest.mark.parametrize("by_request", [True, False], ids=["it crashes", "it is killed from outside"])
async def test_a_caller_who_does_not_wait_hears_whether_the_request_may_have_ended_its_engine(by_request):
    async with holding() as model:
        answer = asyncio.create_task(model.answer(POISON if by_request else 1, restart_wait_s=0.0))
        if by_request:
            await eventually(lambda: model.engines[0].status.in_flight)
            model.let_go()
        else:
            await model.kill()
        with pytest.raises(EngineDied) as caught:
            await answer
        assert caught.value.code == ("engine_crashed" if by_request else "engine_unavailable")


async def test_a_request_under_which_an_engine_of_another_node_died_runs_alone_and_kills_one_engine_here(tmp_path):
    log = tmp_path / "log"
    async with holding(log=str(log)) as model:
        innocent = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 4)]
        await eventually(lambda: model.engines[0].status.in_flight == 3)
        poisonous = asyncio.create_task(model.answer(POISON, engine_deaths=1))
        accused = asyncio.create_task(model.answer(7, 8, engine_deaths=1))
        model.let_go()
        with pytest.raises(EngineCrashed):
            await poisonous
        assert await asyncio.gather(*innocent) == [([n, n + 1], Device.CPU) for n in range(1, 4)]
        assert await accused == ([7, 8], Device.CPU)
        assert [line for line in log.read_text().splitlines() if line.startswith("die with")] == ["die with 1"]


async def test_others_wait_for_a_suspect_no_longer_than_twice_the_time_after_which_the_engine_died(tmp_path):
    log = tmp_path / "log"
    async with serving(log=str(log), step_s=0.02) as model:
        for placement in model.placements:
            placement.suspects.alone_s = 0.1
        begun = asyncio.Event()
        accused = asyncio.create_task(model.answer(*range(1, 400), on_first=begun.set, engine_deaths=1))
        await begun.wait()
        assert await model.answer(7, 8) == ([7, 8], Device.CPU)
        assert not accused.done()
        accused.cancel()
