"""Engines that answer garbage, and engines that are loaded and unloaded on demand: scripted, in real processes."""

import asyncio
import os
import signal

import psutil
import pytest

from tests.faults.engines.test_engine_faults import collect, running, until
from tests.support.waiting import eventually
from worker_node.core.errors import EngineUnavailable
from worker_node.core.types import Device
from worker_node.engines.process import CanaryFailed, EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.restart import RestartLimits

QUESTION = (5, 6, 7)
WAY_OUT = "sudo rmmod intel_vpu; sudo modprobe intel_vpu"


async def canary(engine):
    answer = await collect(engine, *QUESTION)
    if answer != list(QUESTION):
        raise CanaryFailed("the answer is garbage")


async def test_garbage_quarantines_at_once():
    async with running(canary, garbage_after=0) as engine:
        status = await until(engine, EngineState.QUARANTINED)
        assert status.restarts == 1
        assert "its known question was answered wrongly: the answer is garbage" in status.reason
        assert status.retry_after > 200
        assert status.proven_at is None


async def test_a_device_that_goes_wrong_later_is_found_when_idle():
    async with running(canary, limits=EngineLimits(canary_interval_s=0.05), garbage_after=2) as engine:
        first = await until(engine, EngineState.READY)
        assert first.proven_at is not None
        status = await until(engine, EngineState.QUARANTINED)
        assert "its known question was answered wrongly" in status.reason
        assert not psutil.pid_exists(first.pid)
        with pytest.raises(EngineUnavailable, match="its known question was answered wrongly"):
            await collect(engine, *QUESTION)


async def test_an_engine_that_dies_in_the_load_after_a_quarantine_is_quarantined_again(tmp_path):
    order = tmp_path / "order"
    order.write_text("")
    limits = EngineLimits(canary_interval_s=0.05, restart=RestartLimits(crash_window_s=0.001, quarantine_s=0.05))
    async with running(canary, limits=limits, garbage_after=2, on_load=str(order)) as engine:
        await until(engine, EngineState.READY)
        order.write_text("wait")
        await eventually(lambda: engine.status.restarts == 1 and engine.status.pid)
        os.kill(engine.status.pid, signal.SIGSEGV)
        await eventually(lambda: engine.status.restarts == 2)
        assert "it crashed again after a quarantine" in engine.status.reason


async def test_a_busy_engine_is_not_examined():
    asked = []

    async def counting(process):
        asked.append(process.in_flight)

    async with running(counting, limits=EngineLimits(canary_interval_s=0.01), step_s=0.02, garbage_after=100) as engine:
        await until(engine, EngineState.READY)
        before = len(asked)
        await asyncio.gather(collect(engine, *range(1, 30)))
        assert asked == [0] * len(asked)
        await eventually(lambda: len(asked) > before + 1)


async def test_a_lost_device_fails_its_jobs_with_the_reason_and_the_process_is_replaced(caplog):
    limits = EngineLimits(restart=RestartLimits(first_backoff_s=0.05))
    async with running(limits=limits, device=Device.NPU, garbage_after=0, lost=True) as engine:
        first = await until(engine, EngineState.READY)
        with pytest.raises(EngineUnavailable, match="DEVICE_LOST"):
            await collect(engine, *QUESTION)
        await eventually(lambda: engine.status.restarts)
        assert "DEVICE_LOST" in engine.status.reason
        assert WAY_OUT in engine.status.reason
        assert engine.status.reason in caplog.text
        assert (await until(engine, EngineState.READY)).pid != first.pid


@pytest.mark.parametrize("device", [Device.NPU, Device.CPU])
async def test_an_npu_without_a_free_context_is_explained_and_no_other_device_is(device):
    error = "open /dev/accel/accel0: EMFILE (Too many open files)"
    async with running(device=device, load_error=error) as engine:
        status = await until(engine, EngineState.FAILED)
        assert error in status.reason
        assert ("64 and 127 for one user" in status.reason) == (device is Device.NPU)
        assert ("sudo fuser -v /dev/accel/accel0" in status.reason) == (device is Device.NPU)


@pytest.mark.parametrize(("driver", "state"), [("1.32", "ready"), (None, "ready"), ("1.33", "failed")])
async def test_what_was_proven_with_one_driver_is_not_served_with_another(driver, state):
    async with running(proven_with=("1.32", "2026.4"), driver=driver) as engine:
        status = await until(engine, EngineState.READY, EngineState.FAILED)
        assert (status.state, status.stale) == (state, state == "failed")


async def test_what_cannot_be_loaded_is_tried_again_in_case_the_cause_is_removed(tmp_path):
    log = tmp_path / "log"
    limits = EngineLimits(restart=RestartLimits(quarantine_s=0.05))
    async with running(limits=limits, load_error="no driver", log=str(log)) as engine:
        status = await until(engine, EngineState.FAILED)
        assert "no driver" in status.reason
        assert status.retry_after is not None
        await eventually(lambda: log.read_text().count("load") >= 3)
