"""A job from its caller to an engine process and back, within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import numpy as np

from worker_node.engines.base import EmbeddingOutput
from worker_node.engines.messages import VECTOR_DTYPE, Cancel, EmbedJob, GenerateJob, TokenDelta
from worker_node.errors import DeadlineExceeded, EngineUnavailable
from worker_node.hosting.link import EngineLink
from worker_node.hosting.sinks import EmbeddingSink, GenerationSink


async def embed(link: EngineLink, job: EmbedJob, *, suspect: bool) -> EmbeddingOutput:
    """See `Engine.embed`. With `suspect` the death of the process may be put down to the job."""
    sink = EmbeddingSink()
    link.send(job, sink, suspect=suspect)
    try:
        async with asyncio.timeout_at(_loop_time(job.deadline)):
            event = await sink.future
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed before the vectors were ready") from error
    finally:
        _abandon(link, job.id)
    vectors = np.frombuffer(event.vectors, VECTOR_DTYPE).reshape(len(job.lengths), -1)
    return EmbeddingOutput(
        vectors,
        event.started,
        event.inference_s,
        event.busy_us,
        event.busy_shared,
        event.device_tokens,
        event.measured_tokens,
        event.measured_s,
    )


async def generate(link: EngineLink, job: GenerateJob, *, suspect: bool) -> AsyncGenerator[TokenDelta, None]:
    """See `Engine.generate`. With `suspect` the death of the process may be put down to the job."""
    sink = GenerationSink()
    link.send(job, sink, suspect=suspect)
    try:
        while True:
            try:
                async with asyncio.timeout_at(_loop_time(job.deadline)):
                    delta = await sink.next()
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed during generation") from error
            yield delta
            if delta.finish is not None:
                return
    finally:
        _abandon(link, job.id)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, deadline - time.monotonic())


def _abandon(link: EngineLink, job_id: int) -> None:
    """Tell the engine that nobody waits for this job, if it still holds it."""
    if link.forget(job_id):
        with contextlib.suppress(EngineUnavailable):
            link.send(Cancel(job_id))
