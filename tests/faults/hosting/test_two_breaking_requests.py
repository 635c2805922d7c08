"""Two requests that break their engine in different phases, at once, beside innocent ones: scripted engines in real
processes. Each death is a restart: more than 5 s on a busy machine."""

import asyncio
from dataclasses import replace

import pytest

from tests.faults.hosting.rerun_model import serving
from tests.faults.hosting.test_engine_faults import QUICK, until
from tests.support.scripted_runner import LATE, POISON, TAKEN
from worker_node.core.errors import RequestBreaksEngine
from worker_node.engines.process import HostingLimits
from worker_node.engines.protocol import EngineState
from worker_node.tasks.embed.messages import embed_job
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

# Of two at once so many deaths may be counted before they are told apart that the engine is quarantined (docs/npu.md):
# that they are told apart is shown here.
LIMITS = HostingLimits(restart=replace(QUICK, crash_limit=100), stop_timeout_s=1.0)


async def whole(model, *tokens):
    """The answer to a prompt of these tokens, sent as a whole: it can be run again until its end."""
    execution, context = await model.execution(120.0)
    job = GenerateJob(0, embed_job([tokens], 0.0).tokens, 100, context.deadline)
    with execution.admitted():
        while not execution.done:
            got = []
            async with execution.attempt(job, TokenDelta) as deltas:
                async for delta in deltas:
                    got += delta.tokens
    return got


@pytest.mark.parametrize("early", [TAKEN, POISON], ids=["when it is taken", "in its first step"])
async def test_two_that_break_the_engine_at_once_are_refused_and_the_innocent_answered(early):
    async with serving(limits=LIMITS, announce=True, step_s=0.01) as model:
        (engine,) = model.engines
        innocent = [asyncio.create_task(whole(model, *range(n, n + 20))) for n in range(1, 7)]
        guilty = [asyncio.create_task(whole(model, first)) for first in (LATE, early)]
        ends = await asyncio.gather(*guilty, return_exceptions=True)
        assert [type(end) for end in ends] == [RequestBreaksEngine, RequestBreaksEngine]
        assert await asyncio.gather(*innocent) == [list(range(n, n + 20)) for n in range(1, 7)]
        status = await until(engine, EngineState.READY)
        assert status.restarts <= 1 + 2 * len(guilty)
        assert model.placements[0].admission.outstanding == 0
