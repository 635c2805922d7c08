"""The base of scripted engines that answer in the edge process, without an engine process."""

from contextlib import aclosing

import numpy as np

from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, EngineState
from worker_node.tasks.embed.messages import Embedded, EmbedJob


class TaskEngine:
    """An `Engine` whose `embed(rows, *, deadline, interactive)` returns an `EmbeddingOutput`, and whose `generate(job)`
    yields `TokenDelta`s."""

    @property
    def ready(self):
        return self.status.state is EngineState.READY

    async def run(self, job, result):
        if result is Embedded:
            assert isinstance(job, EmbedJob)
            yield await self._embedded(job)
            return
        async with aclosing(self.generate(job)) as deltas:
            async for delta in deltas:
                yield delta

    async def _embedded(self, job):
        ids = np.split(np.frombuffer(job.tokens, TOKEN_DTYPE), np.cumsum(job.lengths)[:-1])
        rows = [row.tolist() for row in ids]
        output = await self.embed(rows, deadline=job.deadline, interactive=job.interactive)
        return Embedded(
            job.id,
            output.vectors.astype(VECTOR_DTYPE).tobytes(),
            output.started,
            output.inference_s,
            output.busy_us,
            output.busy_shared,
            output.device_tokens,
            output.measured_tokens,
            output.measured_s,
        )
