"""A process is replaced, and its successor fails, or it dies or is stopped meanwhile."""

import asyncio
import os
import signal

import psutil
import pytest

from tests.faults.hosting.test_engine_faults import collect
from tests.faults.hosting.test_recycling import HARD, bench, ended, eventually
from worker_node.core.types import Device
from worker_node.engines.process import CanaryFailed
from worker_node.engines.protocol import EngineState


@pytest.mark.parametrize("order", ["die", "error"])
async def test_a_successor_that_cannot_be_loaded_harms_nobody(tmp_path, order):
    async with bench(tmp_path, retry_s=0.05) as it:
        stream = await it.stream()
        it.on_load.write_text(order)
        it.grow()
        await eventually(lambda: it.recycles.get("failed", 0) >= 2)
        assert it.pid == it.first
        assert it.engine.status.state is EngineState.READY
        assert await it.model.answer(1, 2) == ([1, 2], Device.CPU)
        assert not stream.done()
        it.on_load.write_text("go")
        await eventually(lambda: it.pid != it.first)
        await ended(stream)
        it.assert_blameless()
        await eventually(lambda: [pid for pid in it.loads() if psutil.pid_exists(pid)] == [it.pid])


async def test_a_successor_that_answers_wrong_never_serves(tmp_path):
    examined = []

    async def canary(engine):
        examined.append(await collect(engine, 5))
        if len(examined) == 2:
            raise CanaryFailed("the answer to a known question is wrong")

    async with bench(tmp_path, canary=canary) as it:
        stream = await it.stream()
        proof = it.engine.status.proof
        it.grow()
        await eventually(lambda: it.recycles == {"failed": 1})
        assert it.pid == it.first
        assert it.engine.status.proof is proof
        assert not stream.done()
        assert await it.model.answer(1) == ([1], Device.CPU)
        # The bound holds all the same: at the hard one the process is replaced whatever became of its successor.
        await ended(stream)
        it.grow(HARD)
        await eventually(lambda: it.pid not in {it.first, None})
        assert await it.model.answer(1) == ([1], Device.CPU)
        it.assert_blameless()


async def test_the_old_process_dies_while_its_successor_loads(tmp_path):
    async with bench(tmp_path) as it:
        it.on_load.write_text("wait")
        it.grow()
        await eventually(lambda: len(it.loads()) == 2)
        os.kill(it.first, signal.SIGKILL)
        await eventually(lambda: it.engine.status.replacing)
        waiting = asyncio.create_task(it.model.answer(3, 4))
        it.on_load.write_text("go")
        assert await waiting == ([3, 4], Device.CPU)
        assert len(it.loads()) == 2, "the successor serves, and no third process was needed"
        assert it.engine.status.restarts == 1, "this was a crash"


async def test_the_old_process_dies_while_it_finishes_its_requests(tmp_path):
    async with bench(tmp_path) as it:
        stream = await it.stream()
        it.grow()
        await eventually(lambda: it.pid != it.first)
        before = it.submitted()
        os.kill(it.first, signal.SIGKILL)
        await eventually(lambda: it.submitted() > before)
        assert it.engine.status.state is EngineState.READY
        assert it.engine.status.in_flight == 1, "nothing of the answer was out: the successor runs it"
        await ended(stream)
        assert it.engine.status.restarts == 0
        assert len(it.loads()) == 2


@pytest.mark.parametrize("phase", ["loading", "finishing", "loading alone"])
@pytest.mark.parametrize("how", ["stop", "unload"])
async def test_stopping_and_unloading_leave_no_process_behind(tmp_path, phase, how):
    async with bench(tmp_path, beside=phase != "loading alone") as it:
        stream = await it.stream() if phase == "finishing" else None
        it.on_load.write_text("go" if phase == "finishing" else "wait")
        it.grow()
        await eventually(lambda: len(it.loads()) == 2 and (phase == "loading" or it.pid != it.first))
        if how == "unload":
            assert await it.engine.unload() is (phase == "loading")
        if how == "stop" or phase != "loading":
            await it.engine.stop()
        if stream is not None:
            await asyncio.gather(stream, return_exceptions=True)
        await eventually(lambda: not any(psutil.pid_exists(pid) for pid in it.loads()))
        if it.engine.status.state is EngineState.UNLOADED:
            it.on_load.write_text("go")
            it.engine.wake()
            assert (await it.engine.settled()).state is EngineState.READY
