"""Engines that are stopped (SIGSTOP) in each phase: deadlines hold, others are answered, nobody is blamed.

And engines that hang in a native call for one request, whose caller has left by the time that this is noticed. Scripted
engines in real processes. Each test waits for its watchdog, some of them three times.
"""

import asyncio
import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from tests.faults.engines.rerun_model import Model, serving
from tests.faults.engines.test_engine_faults import HANG_S, QUICK, collect, until
from tests.support.scripted_runner import WEDGE
from tests.support.waiting import eventually
from worker_node.core.errors import DeadlineExceeded, RequestBreaksEngine, Retryable
from worker_node.core.types import Device
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.watchdog import LivenessLimits

LIMITS = EngineLimits(
    restart=QUICK, stop_timeout_s=1.0, liveness=LivenessLimits(watchdog_s=HANG_S, run_timeout_s=HANG_S)
)
SHORT_S = 0.5


async def holding(engine, count):
    await eventually(lambda: engine.ready and engine.status.in_flight >= count)


# Three crashes would quarantine it.
@pytest.mark.parametrize(("phase", "runs"), [("a prefill", 3), ("an embedding run", 1)])
async def test_an_engine_that_is_stopped_at_work_keeps_nobody_beyond_a_deadline_and_harms_nobody(phase, runs, tmp_path):
    hold = tmp_path / "hold"
    async with serving(limits=LIMITS, announce=True, hold=str(hold)) as model:
        (engine,) = model.engines
        ask = model.answer if phase == "a prefill" else model.embed

        def work(number, seconds):
            return ask(number, number + 1, seconds=seconds) if phase == "a prefill" else ask([number], seconds=seconds)

        for times in range(1, runs + 1):
            hold.touch()
            patient = [asyncio.create_task(work(n, 60.0)) for n in range(1, 4)]
            short = asyncio.create_task(work(10, SHORT_S))
            leaving = asyncio.create_task(work(11, 60.0))
            # The one whose time is short may have had it.
            await holding(engine, 4)
            os.kill(engine.status.pid, signal.SIGSTOP)
            hold.unlink()
            leaving.cancel()
            with pytest.raises(DeadlineExceeded):
                await short
            assert not any(task.done() for task in patient)
            assert len(await asyncio.gather(*patient)) == 3
            await eventually(lambda times=times: engine.status.restarts >= times)
            assert not model.placements[0].suspects, "no request can stop a process"
            assert model.placements[0].admission.outstanding == 0
        assert (await until(engine, EngineState.READY)).restarts == runs, "stopped from outside is no crash"


@pytest.mark.parametrize("signal_", [signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("when", ["first", "again"])
async def test_an_engine_that_is_stopped_or_killed_in_its_canary_is_started_again_and_nobody_is_blamed(when, signal_):
    asked, hit = [], asyncio.Event()

    async def canary(process):
        asked.append(process.pid)
        question = asyncio.create_task(collect(process, *range(1, 30)))
        if len(asked) == (1 if when == "first" else 2):
            await asyncio.sleep(0)
            os.kill(process.pid, signal_)
            hit.set()
        await question

    model = Model((Device.CPU,), replace(LIMITS, canary_interval_s=0.05), {"announce": True, "step_s": 0.005}, canary)
    (engine,) = model.engines
    engine.wake()
    try:
        await asyncio.wait_for(hit.wait(), 60)
        # Callers meanwhile: one of a short deadline, one who waits for the engine.
        short = asyncio.create_task(model.answer(1, 2, seconds=SHORT_S))
        patient = asyncio.create_task(model.answer(3, 4))
        with suppress(DeadlineExceeded, Retryable):
            await short
        # An engine that never served is not waited for when its load failed: that is told, and when to come again.
        with suppress(Retryable) if when == "first" else nullcontext():
            assert await patient == ([3, 4], Device.CPU)
        assert engine.status.restarts == 1
        assert engine.status.wrong == 0
        if signal_ is not signal.SIGSEGV:
            assert not model.placements[0].suspects
        await until(engine, EngineState.READY)
        assert await model.answer(3, 4) == ([3, 4], Device.CPU)
        assert await model.answer(1, 2) == ([1, 2], Device.CPU), "nobody is refused for it"
    finally:
        await engine.stop()


async def test_a_request_that_hangs_the_engine_and_leaves_is_found_and_those_who_waited_are_answered():
    """Its caller is gone when the watchdog ends the engine: those in the queue were blamed, and in the end refused."""
    async with serving(limits=LIMITS) as model:
        (engine,) = model.engines
        suspects = model.placements[0].suspects
        for times in (1, 2):
            guilty = asyncio.create_task(model.answer(WEDGE, seconds=SHORT_S))
            await holding(engine, 1)
            waiting = asyncio.create_task(model.answer(1, 2))
            with pytest.raises(DeadlineExceeded):
                await guilty
            assert await waiting == ([1, 2], Device.CPU)
            assert engine.status.restarts == times
            assert len(suspects) == 1, "the one that left, and nobody else"
        with pytest.raises(RequestBreaksEngine):
            await model.answer(WEDGE, seconds=SHORT_S)
        assert await model.answer(1, 2) == ([1, 2], Device.CPU)
