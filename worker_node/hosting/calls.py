"""A job from its caller to an engine process and back, within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec

from worker_node.engines.base import R
from worker_node.engines.messages import Cancel, Job
from worker_node.errors import DeadlineExceeded, EngineUnavailable
from worker_node.hosting.link import EngineLink
from worker_node.hosting.sinks import JobSink


async def run(link: EngineLink, job: Job, result: type[R], *, suspect: bool) -> AsyncGenerator[R, None]:
    """See `Engine.run`. With `suspect` the death of the process may be put down to the job."""
    sink = JobSink()
    link.submit(job, sink, suspect=suspect)
    # One timer for the whole job: a stream has a result for each token.
    late = DeadlineExceeded("the deadline passed while the engine worked on the request")
    timer = asyncio.get_running_loop().call_later(max(0.0, job.deadline - time.monotonic()), sink.on_error, late)
    try:
        while True:
            received = await sink.next()
            yield _decoded(link, received.body, result)
            if received.last:
                return
    finally:
        timer.cancel()
        _abandon(link, job.id)


def _decoded(link: EngineLink, body: msgspec.Raw, result: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(body, type=result)
    except msgspec.MsgspecError as error:
        link.kill(f"sent a result that cannot be read ({error})")
        raise EngineUnavailable("the engine sent a result that cannot be read; it is started again") from error


def _abandon(link: EngineLink, job_id: int) -> None:
    """Tell the engine that nobody waits for this job, if it still holds it."""
    if link.forget(job_id):
        with contextlib.suppress(EngineUnavailable):
            link.send(Cancel(job_id))
