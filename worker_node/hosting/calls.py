"""A job from its caller to an engine process and back, within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Generic, Self

import msgspec

from worker_node.core.errors import DeadlineExceeded, EngineUnavailable
from worker_node.engines.base import R
from worker_node.engines.messages import Cancel, Job
from worker_node.hosting.link import EngineLink
from worker_node.hosting.sinks import JobSink


class JobResults(Generic[R]):
    """The results of one job, see `Engine.run`. The job is submitted when the first result is requested.

    `find_link` returns the process that gets it then, or raises. With `suspect` the job may be blamed for the death of
    the process. An iterator and not a generator, because the event loop keeps a record of each generator that is
    started.
    """

    __slots__ = ("_ended", "_find_link", "_job", "_link", "_result", "_sink", "_suspect", "_timer")

    def __init__(self, find_link: Callable[[], EngineLink], job: Job, result: type[R], *, suspect: bool) -> None:
        self._find_link = find_link
        self._job = job
        self._result = result
        self._suspect = suspect
        self._sink = JobSink()
        self._link: EngineLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        if self._ended:
            raise StopAsyncIteration
        try:
            link = self._link or self._submit()
            received = await self._sink.next()
            result = _decoded(link, received.body, self._result)
        except BaseException:
            self._end()
            raise
        if received.last:
            self._end()
        return result

    async def aclose(self) -> None:
        """Cancel the job if it has not ended."""
        self._end()

    def _submit(self) -> EngineLink:
        link, job = self._find_link(), self._job
        link.submit(job, self._sink, suspect=self._suspect)
        self._link = link
        # One timer for the whole job: a stream has a result for each token.
        self._timer = asyncio.get_running_loop().call_later(max(0.0, job.deadline - time.monotonic()), self._late)
        return link

    def _late(self) -> None:
        self._sink.put(DeadlineExceeded("the deadline passed while the engine worked on the request"))

    def _end(self) -> None:
        """Cancel the job in the engine, if it still holds it."""
        self._ended = True
        link, self._link = self._link, None
        if link is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if link.forget(self._job.id):
            with contextlib.suppress(EngineUnavailable):
                link.send(Cancel(self._job.id))


def _decoded(link: EngineLink, body: msgspec.Raw, result: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(body, type=result)
    except msgspec.MsgspecError as error:
        link.kill(f"sent a result that cannot be read ({error})")
        raise EngineUnavailable("the engine sent a result that cannot be read; it is started again") from error
