"""A model with scripted engines in real processes, and the serving path above them without its tokenizer."""

import asyncio
import os
import signal
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.engines.test_engine_faults import QUICK, no_canary, until
from tests.support.scripted_runner import RUNNER
from tests.support.waiting import eventually
from worker_node.core.types import Device, ModelKind, RequestContext
from worker_node.devices.memory import KERNEL
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import Engine
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving.routing import Demand, select_placement
from worker_node.serving.run import Execution
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

LIMITS = EngineLimits(restart=QUICK, stop_timeout_s=1.0)


class Model:
    """A model with a scripted engine on each device."""

    def __init__(self, devices, limits, options, canary=no_canary, memory=KERNEL, runner=RUNNER):
        suspects = Suspects()
        self._hold = Path(options.get("hold", os.devnull))
        self.engines = [
            Engine(
                EngineSpec("m", ModelKind.GENERATION, "/", device, runner, options, emulated=True),
                canary,
                limits,
                suspects=suspects,
                memory=memory,
            )
            for device in devices
        ]
        self.placements = [
            Placement(device, engine, Admission("m", AdmissionLimits(64, 64)), 8192, 8192, suspects=suspects)
            for device, engine in zip(devices, self.engines, strict=True)
        ]

    async def execution(self, seconds, **more):
        now = time.monotonic()
        context = RequestContext("req_1", now, now + seconds, **more)
        demand = Demand("m", self.placements, 8, 8, 1)
        return Execution(demand, context, await select_placement(demand, context)), context

    async def answer(self, *tokens, seconds=60.0, on_first=None, head=False, whole=False, **more):
        """The tokens and the device of the answer to a prompt of these tokens; `more`: fields of `RequestContext`.

        It is sent token by token, or with `whole` at its end: then it can be run again until that.
        """
        execution, context = await self.execution(seconds, **more)
        if head:
            execution.pinned = True
        job = GenerateJob(0, row_job([tokens], 0.0).tokens, 100, context.deadline)
        with execution.admitted():
            while not execution.done:
                got = []
                async with execution.attempt(job, TokenDelta) as deltas:
                    async for delta in deltas:
                        execution.sent = not whole
                        if not got and on_first:
                            on_first()
                        got += delta.tokens
        return got, execution.route.device

    async def embed(self, *rows, seconds=60.0):
        execution, context = await self.execution(seconds)
        with execution.admitted():
            while not execution.done:
                async with execution.attempt(row_job(rows, context.deadline), RowResult) as results:
                    output = (await anext(results)).rows(len(rows))
        return output

    def let_go(self):
        self._hold.unlink()

    async def kill(self, index=0, *, holding=1, number=signal.SIGKILL, let_go=True):
        """Kill an engine as soon as it holds so many jobs; those that come after it are not held."""
        engine = self.engines[index]
        await eventually(lambda: engine.ready and engine.status.in_flight >= holding)
        os.kill(engine.status.pid, number)
        if let_go:
            self.let_go()


@asynccontextmanager
async def serving(*devices, limits=LIMITS, canary=no_canary, memory=KERNEL, runner=RUNNER, **options):
    """Yields a `Model`, all of whose engines are ready; `options` are the runner's."""
    model = Model(devices or (Device.CPU,), limits, options, canary, memory, runner)
    for engine in model.engines:
        engine.wake()
    try:
        for engine in model.engines:
            await until(engine, EngineState.READY)
        yield model
    finally:
        await asyncio.gather(*(engine.stop() for engine in model.engines))


@asynccontextmanager
async def holding(*devices, **how):
    """As `serving`, with engines that take no step until `Model.kill` or `Model.let_go`."""
    with tempfile.TemporaryDirectory() as directory:
        hold = Path(directory) / "hold"
        hold.touch()
        async with serving(*devices, hold=str(hold), **how) as model:
            yield model
