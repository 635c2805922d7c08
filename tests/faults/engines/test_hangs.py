"""Hangs that look like life, and life that looks like a hang: scripted engines in real processes."""

import asyncio
import time

import pytest

from tests.faults.engines.test_engine_faults import HANG_S, QUICK, collect, running, until
from tests.support.scripted_runner import STALL
from worker_node.core.errors import EngineUnavailable
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.watchdog import LivenessLimits


async def test_a_device_that_hangs_behind_a_beating_loop_is_found_and_replaced():
    limits = EngineLimits(liveness=LivenessLimits(HANG_S, run_timeout_s=HANG_S), restart=QUICK)
    async with running(limits=limits) as engine:
        await until(engine, EngineState.READY)
        async with asyncio.timeout(30):
            with pytest.raises(EngineUnavailable, match="a run of 1 tokens has not ended"):
                await collect(engine, STALL)
        await until(engine, EngineState.READY)
        assert await collect(engine, 1, 2) == [1, 2]


async def test_an_idle_engine_that_does_not_answer_its_canary_is_replaced():
    examined = []

    async def canary(process):
        examined.append(process.pid)
        hangs = len(examined) == 2
        await collect(process, *([STALL] if hangs else [1]), deadline=time.monotonic() + (0.1 if hangs else 60))

    limits = EngineLimits(canary_interval_s=0.05, restart=QUICK)
    async with running(canary=canary, limits=limits) as engine:
        first = await until(engine, EngineState.READY)
        async with asyncio.timeout(30):
            while not engine.status.restarts:
                await asyncio.sleep(0.01)
        assert "canary not answered" in engine.status.reason
        assert engine.status.wrong == 0, "it gave no wrong answer"
        assert (await until(engine, EngineState.READY)).pid != first.pid


async def test_a_canary_that_had_no_turn_behind_requests_is_put_off():
    examined, request = [], []

    async def canary(process):
        examined.append(process.pid)
        if len(examined) == 2:
            # Requests came in when it was about to begin, and take their time; it is not answered in its own.
            request.append(asyncio.create_task(collect(engine, *range(1, 60))))
            await asyncio.sleep(0)
            await collect(process, STALL, deadline=time.monotonic() + 0.1)

    limits = EngineLimits(canary_interval_s=0.05, restart=QUICK)
    async with running(canary=canary, limits=limits, step_s=0.01) as engine:
        first = await until(engine, EngineState.READY)
        async with asyncio.timeout(30):
            while not request:
                await asyncio.sleep(0.01)
            assert len(await request[0]) == 59
            while len(examined) < 3:
                await asyncio.sleep(0.01)
        assert (engine.status.pid, engine.status.restarts) == (first.pid, 0)
