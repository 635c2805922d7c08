"""Engines that answer garbage, and engines that are loaded and unloaded on demand: scripted, in real processes."""

import asyncio

import psutil
import pytest

from tests.faults.engines.test_engine_faults import collect, no_canary, until
from tests.support.scripted_runner import RUNNER
from worker_node.core.errors import EngineUnavailable
from worker_node.core.types import Device, ModelKind
from worker_node.engines.process import CanaryFailed, EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.restart import RestartLimits
from worker_node.engines.supervisor import Engine

QUESTION = (5, 6, 7)


async def canary(engine):
    answer = await collect(engine, *QUESTION)
    if answer != list(QUESTION):
        raise CanaryFailed("the answer is garbage")


def make(canary=canary, *, limits=None, device=Device.CPU, after=0, **options):
    options["garbage_after"] = after
    spec = EngineSpec("garbage", ModelKind.GENERATION, "/", device, RUNNER, options)
    return Engine(spec, canary, limits or EngineLimits())


async def test_garbage_quarantines_at_once():
    engine = make()
    engine.wake()
    try:
        status = await until(engine, EngineState.QUARANTINED)
        assert status.restarts == 1
        assert "its known question was answered wrongly: the answer is garbage" in status.reason
        assert status.retry_after > 200
        assert status.proof is None
    finally:
        await engine.stop()


async def test_a_device_that_goes_wrong_later_is_found_when_idle():
    engine = make(limits=EngineLimits(canary_interval_s=0.05), after=2)
    engine.wake()
    try:
        first = await until(engine, EngineState.READY)
        assert first.proof is not None
        status = await until(engine, EngineState.QUARANTINED)
        assert "its known question was answered wrongly" in status.reason
        assert not psutil.pid_exists(first.pid)
        with pytest.raises(EngineUnavailable, match="its known question was answered wrongly"):
            await collect(engine, *QUESTION)
    finally:
        await engine.stop()


async def test_a_busy_engine_is_not_examined():
    asked = []

    async def counting(process):
        asked.append(process.in_flight)

    engine = make(counting, limits=EngineLimits(canary_interval_s=0.01), step_s=0.02, after=100)
    engine.wake()
    try:
        await until(engine, EngineState.READY)
        before = len(asked)
        await asyncio.gather(collect(engine, *range(1, 30)))
        assert asked == [0] * len(asked)
        async with asyncio.timeout(10):
            while len(asked) <= before + 1:
                await asyncio.sleep(0.01)
    finally:
        await engine.stop()


async def test_a_lost_device_fails_its_jobs_with_the_reason_and_the_process_is_replaced():
    limits = EngineLimits(restart=RestartLimits(first_backoff_s=0.05))
    engine = make(no_canary, limits=limits, after=0, lost=True)
    engine.wake()
    try:
        first = await until(engine, EngineState.READY)
        with pytest.raises(EngineUnavailable, match="DEVICE_LOST"):
            await collect(engine, *QUESTION)
        async with asyncio.timeout(30):
            while not engine.status.restarts:
                await asyncio.sleep(0)
        assert "DEVICE_LOST" in engine.status.reason
        assert (await until(engine, EngineState.READY)).pid != first.pid
    finally:
        await engine.stop()


@pytest.mark.parametrize("device", [Device.NPU, Device.CPU])
async def test_what_cannot_be_loaded_is_tried_again_in_case_the_cause_is_removed(tmp_path, device):
    log = tmp_path / "log"
    limits = EngineLimits(restart=RestartLimits(quarantine_s=0.05))
    engine = make(no_canary, limits=limits, device=device, load_error="no driver", log=str(log))
    engine.wake()
    try:
        status = await until(engine, EngineState.FAILED)
        assert "no driver" in status.reason
        assert status.retry_after is not None
        async with asyncio.timeout(30):
            while log.read_text().count("load") < 3:
                await asyncio.sleep(0.01)
    finally:
        await engine.stop()
