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


def running(installed, **set_options):
    """A ready engine process for an installed model on the CPU, with the node's own defaults where nothing is set."""
    options = {"context_limit": installed.context_limit} if installed.kind == ModelKind.EMBEDDING else {}
    return _running(
        EngineSpec(
            installed.id,
            installed.kind,
            str(installed.path),
            Device.CPU,
            RUNNERS[installed.kind],
            options | set_options,
        )
    )


def embedding_on_npu(installed, counter, **options):
    """A ready engine process of the emulated NPU, with the stand-in for its busy counter."""
    options |= {"busy_counter": str(counter), "stand_in": True}
    runner = "worker_node.encoders.static:StaticEncoder"
    return _running(
        EngineSpec(installed.id, installed.kind, str(installed.path), Device.NPU, runner, options, emulated=True)
    )


@contextlib.asynccontextmanager
async def _running(spec):
    engine = Engine(spec, _unexamined, EngineLimits())
    engine.wake()
    try:
        await engine.settled()
        yield engine
    finally:
        await engine.stop()


async def embed(engine, requests, callers, on_result=None):
    """Texts per second; each request is a list of rows of token ids, `callers` are sent at once.

    `on_result` is called with the number of each request and its result.
    """
    waiting = iter(enumerate(requests))

    async def caller():
        for number, rows in waiting:
            async with contextlib.aclosing(
                engine.run(row_job(rows, time.monotonic() + DEADLINE_S), RowResult)
            ) as results:
                result = await anext(results)
            if on_result is not None:
                on_result(number, result)

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
