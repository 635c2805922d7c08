"""The base of scripted engines that answer in the edge process, without an engine process."""

import time
from contextlib import aclosing

import msgspec
import numpy as np

from worker_node.core.types import NOT_MEASURED
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, EngineState


def encoded(vectors, *, busy=NOT_MEASURED, device_tokens=None):
    data = np.asarray(vectors, VECTOR_DTYPE).tobytes()
    return RowResult(0, data, time.monotonic(), 0.0, busy, device_tokens)


async def vectors_of(engine, rows, *, deadline):
    async with aclosing(engine.run(row_job(rows, deadline), RowResult)) as results:
        return (await anext(results)).rows(len(rows))


class TaskEngine:
    """An `Engine` whose `embed(rows, *, deadline, interactive)` returns what `encoded` makes, and whose `generate(job)`
    yields `TokenDelta`s."""

    recoveries = 0

    @property
    def ready(self):
        return self.status.state is EngineState.READY

    async def run(self, job, result):
        if result is RowResult:
            ids = np.split(np.frombuffer(job.tokens, TOKEN_DTYPE), np.cumsum(job.lengths)[:-1])
            rows = [row.tolist() for row in ids]
            output = await self.embed(rows, deadline=job.deadline, interactive=job.interactive)
            yield msgspec.structs.replace(output, id=job.id)
            return
        async with aclosing(self.generate(job)) as deltas:
            async for delta in deltas:
                yield delta
