"""An engine process driven directly, without HTTP, routing or admission: what the edge adds is the rest."""

import asyncio
import contextlib
import statistics
import time

import numpy as np

from worker_node.core.types import Device, ModelKind
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import TOKEN_DTYPE, EngineSpec
from worker_node.engines.supervisor import Engine
from worker_node.tasks.generate.messages import GenerateJob, Sampling, TokenDelta

RUNNERS = {
    ModelKind.EMBEDDING: "worker_node.encoders.dynamic:DynamicEncoder",
    ModelKind.GENERATION: "worker_node.tasks.generate.continuous:ContinuousRunner",
}
DEADLINE_S = 600.0


async def _unexamined(_engine):
    """A benchmark needs no canary."""


@contextlib.asynccontextmanager
async def running(installed, **set_options):
    """A ready engine process for an installed model on the CPU, with the node's own defaults where nothing is set."""
    options = {"context_limit": installed.context_limit} if installed.kind == ModelKind.EMBEDDING else {}
    spec = EngineSpec(
        installed.id, installed.kind, str(installed.path), Device.CPU, RUNNERS[installed.kind], options | set_options
    )
    engine = Engine(spec, _unexamined, EngineLimits())
    engine.wake()
    try:
        await engine.settled()
        yield engine
    finally:
        await engine.stop()


async def embed(engine, requests, callers):
    """Texts per second; each request is a list of rows of token ids, `callers` are sent at once."""
    waiting = iter(requests)

    async def caller():
        for rows in waiting:
            async with contextlib.aclosing(
                engine.run(row_job(rows, time.monotonic() + DEADLINE_S), RowResult)
            ) as results:
                await anext(results)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return sum(map(len, requests)) / (time.perf_counter() - began)


async def generate(engine, prompts, tokens, callers):
    """Output tokens per second and the median time to first token in seconds; prompts are token ids."""
    waiting = iter(prompts)
    firsts = []

    async def caller():
        produced = 0
        for ids in waiting:
            sent = time.perf_counter()
            flat = np.asarray(ids, TOKEN_DTYPE).tobytes()
            job = GenerateJob(0, flat, tokens, time.monotonic() + DEADLINE_S, Sampling(ignore_eos=True))
            seen = 0
            async for delta in engine.run(job, TokenDelta):
                if not seen:
                    firsts.append(time.perf_counter() - sent)
                seen += len(delta.tokens)
            produced += seen
        return produced

    began = time.perf_counter()
    produced = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return produced / (time.perf_counter() - began), statistics.median(firsts)
