"""Engines whose memory grows are replaced: scripted ones in real processes, with a memory that the test writes.

What is in flight, and what comes meanwhile.
"""

import asyncio
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.faults.engines.rerun_model import serving
from tests.faults.engines.test_engine_faults import QUICK, no_canary
from tests.support.scripted_runner import STALL
from tests.support.waiting import eventually
from worker_node.core.errors import DeadlineExceeded, EngineDied
from worker_node.core.types import Device
from worker_node.devices.memory import MemoryReader
from worker_node.engines.process import EngineLimits
from worker_node.engines.restart import GrowthLimits

SOFT, HARD = 1000, 2000


class Bench:
    """A model with one scripted engine, and control of its memory and of its loads."""

    def __init__(self, model, grown, on_load, log):
        self.model = model
        self.engine = model.engines[0]
        self.grown = grown
        self.on_load = on_load
        self._log = log
        self.first = self.engine.status.pid

    @property
    def pid(self):
        return self.engine.status.pid

    @property
    def recycles(self):
        return {how: count for how, count in self.engine.status.recycles.items() if count}

    def grow(self, by=SOFT):
        self.grown[self.pid] = by

    def submitted(self):
        return self._log.read_text().count("submit")

    async def stream(self):
        """A request that is at work and gives no token until it is cancelled."""
        before = self.submitted()
        task = asyncio.create_task(self.model.answer(STALL))
        await eventually(lambda: self.submitted() > before)
        return task

    def assert_blameless(self):
        """A replacement is no failure."""
        status = self.engine.status
        assert (status.restarts, status.wrong) == (0, 0)
        assert not self.model.placements[0].suspects


async def ended(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def bench(tmp_path, *, canary=no_canary, drain_s=60.0, **options):
    grown, on_load, log = {}, tmp_path / "on_load", tmp_path / "log"
    memory = MemoryReader(lambda pid: 100 + grown.get(pid, 0))
    on_load.write_text("go")
    growth = GrowthLimits(SOFT, look_s=0.01, drain_s=drain_s)
    limits = EngineLimits(restart=QUICK, stop_timeout_s=1.0, growth=growth)
    options |= {"log": str(log), "on_load": str(on_load)}
    async with serving(limits=limits, canary=canary, memory=memory, **options) as model:
        yield Bench(model, grown, on_load, log)


async def test_a_process_over_its_bound_is_replaced_once_it_is_idle(tmp_path):
    async with bench(tmp_path) as it:
        stream = await it.stream()
        it.grow()
        assert await it.model.answer(1) == ([1], Device.CPU)
        assert it.pid == it.first
        it.on_load.write_text("wait")
        await ended(stream)
        await eventually(lambda: it.engine.status.replacing)
        await eventually(lambda: not psutil.pid_exists(it.first))
        # Who comes now waits for the engine, up to his deadline.
        patient = asyncio.create_task(it.model.answer(5, 6))
        with pytest.raises(DeadlineExceeded):
            await it.model.answer(7, seconds=0.2)
        leaving = asyncio.create_task(it.model.answer(8))
        await asyncio.sleep(0)
        await ended(leaving)
        assert not patient.done()
        it.on_load.write_text("go")
        assert await patient == ([5, 6], Device.CPU)
        assert it.submitted() == 3, "nothing was run for those who did not wait"
        assert it.recycles == {"idle": 1}
        assert not it.engine.status.replacing
        it.assert_blameless()


async def test_a_process_far_over_its_bound_is_forced_out_and_its_requests_are_run_again(tmp_path):
    async with bench(tmp_path, drain_s=0.1, step_s=0.05) as it:
        silent = await it.stream()
        begun = asyncio.Event()
        speaking = asyncio.create_task(it.model.answer(*range(1, 200), on_first=begun.set))
        await begun.wait()
        it.on_load.write_text("wait")
        it.grow(HARD)
        await eventually(lambda: not psutil.pid_exists(it.first))
        with pytest.raises(EngineDied, match="memory had grown"):
            await speaking
        assert it.engine.status.replacing
        waiting = asyncio.create_task(it.model.answer(3, 4))
        before = it.submitted()
        it.on_load.write_text("go")
        assert await waiting == ([3, 4], Device.CPU)
        await eventually(lambda: it.submitted() == before + 2)
        assert not silent.done(), "nothing of it was out, so it is run again"
        await ended(silent)
        assert it.recycles == {"forced": 1}
        it.assert_blameless()
