"""Keeps one engine alive over many lives of its process, and is the `Engine` that the node calls.

Death is seen by the closing of the socket, a hang by the watchdog on the engine's heartbeats. After either, the engine
is started again as `restart.py` decides. It is `ready` only after its canary has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from worker_node.engines.base import (
    TOKEN_DTYPE,
    VECTOR_DTYPE,
    Cancel,
    Embedded,
    EmbeddingOutput,
    EmbedJob,
    Engine,
    EngineSpec,
    EngineState,
    EngineStatus,
    GenerateJob,
    Loaded,
    TokenDelta,
)
from worker_node.errors import DeadlineExceeded, EngineUnavailable, NodeError
from worker_node.hosting.link import EngineLink, LoadRefused
from worker_node.hosting.restart import RestartLimits, RestartPolicy

log = logging.getLogger(__name__)

Canary = Callable[[Engine], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HostingLimits:
    """Seconds. A cold compile for an NPU takes minutes, so loading has a limit of its own."""

    load_timeout_s: float = 600.0
    watchdog_s: float = 30.0
    stop_timeout_s: float = 5.0
    restart: RestartLimits = field(default_factory=RestartLimits)


class CanaryFailed(Exception):
    """The engine runs, but what it answers is wrong."""


class SupervisedEngine:
    """An `Engine` in a child process that is restarted when it dies or hangs."""

    def __init__(self, spec: EngineSpec, canary: Canary, limits: HostingLimits) -> None:
        self.spec = spec
        self._canary = canary
        self._limits = limits
        self._policy = RestartPolicy(limits.restart)
        self._ids = itertools.count(1)
        self._link: EngineLink | None = None
        self._state = EngineState.STARTING
        self._reason: str | None = "loading"
        self._loaded: Loaded | None = None
        self._restarts = 0
        self._resume_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        retry_after = None if self._resume_at is None else max(0.1, self._resume_at - time.monotonic())
        state, reason = self._state, self._reason
        if state is EngineState.READY and not (self._link and self._link.up):
            # The process has just died and the supervising task has not had its turn yet.
            state, reason = EngineState.BACKING_OFF, "the engine process died"
        return EngineStatus(
            state=state,
            reason=reason,
            pid=self._link.pid if self._link else None,
            restarts=self._restarts,
            load_seconds=self._loaded.seconds if self._loaded else None,
            device_name=self._loaded.device_name if self._loaded else None,
            retry_after=retry_after,
            in_flight=self._link.in_flight if self._link else 0,
        )

    def start(self) -> None:
        """Begin to run and supervise the engine process."""
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.model_id}")

    async def settled(self) -> EngineStatus:
        """Wait until the engine is ready or is known not to become so by itself soon."""
        while self._state is EngineState.STARTING:
            self._changed.clear()
            await self._changed.wait()
        return self.status

    async def stop(self) -> None:
        """End the engine process for good."""
        link = self._link
        self._set(EngineState.STOPPED, "the node is shutting down")
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if link is not None:
            await link.shut_down(self._limits.stop_timeout_s)

    def _set(self, state: EngineState, reason: str | None) -> None:
        if self._state is not EngineState.STOPPED:
            self._state, self._reason = state, reason
        self._changed.set()

    async def _supervise(self) -> None:
        while True:
            reason = await self._live()
            if reason is None:
                return
            self._restarts += 1
            verdict = self._policy.crashed(time.monotonic(), reason)
            state = EngineState.QUARANTINED if verdict.quarantined else EngineState.BACKING_OFF
            self._resume_at = time.monotonic() + verdict.delay
            self._set(state, verdict.reason)
            log.warning(
                "engine %s on %s ended: %s; next start in %.1f s",
                self.spec.model_id,
                self.spec.device,
                verdict.reason,
                verdict.delay,
            )
            await asyncio.sleep(verdict.delay)
            self._resume_at = None
            self._set(EngineState.STARTING, "starting again after: " + verdict.reason)

    async def _live(self) -> str | None:
        """Run one life of the process; return why it ended, or None if another start would be useless."""
        link = self._link = await EngineLink.spawn(self.spec)
        try:
            try:
                async with asyncio.timeout(self._limits.load_timeout_s):
                    self._loaded = await link.loaded
            except TimeoutError:
                link.kill(f"did not load within {self._limits.load_timeout_s:.0f} s")
                return await link.wait_closed()
            except LoadRefused as error:
                self._set(EngineState.FAILED, f"cannot be loaded: {error}")
                log.error("engine %s on %s cannot be loaded: %s", self.spec.model_id, self.spec.device, error)
                await link.wait_closed()
                return None
            except EngineUnavailable:
                return f"{await link.wait_closed()} while loading"
            return await self._serve(link)
        finally:
            if self._state is not EngineState.STOPPED:
                self._link = None
                status = await link.reap()
                log.info("engine %s on %s: exit status %s", self.spec.model_id, self.spec.device, status)

    async def _serve(self, link: EngineLink) -> str:
        watchdog = asyncio.create_task(self._watch(link), name=f"watchdog {self.spec.model_id}")
        try:
            try:
                await self._canary(self)
            except CanaryFailed as error:
                link.kill(f"canary failed: {error}")
                return await link.wait_closed()
            except NodeError as error:
                link.kill(f"canary could not run: {error.message}")
                return await link.wait_closed()
            self._set(EngineState.READY, None)
            log.info("engine %s on %s is ready, pid %s", self.spec.model_id, self.spec.device, link.pid)
            return await link.wait_closed()
        finally:
            watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watchdog

    async def _watch(self, link: EngineLink) -> None:
        while True:
            silent = time.monotonic() - link.last_heard
            if silent >= self._limits.watchdog_s:
                link.kill(f"hung: no heartbeat for {silent:.0f} s")
                return
            await asyncio.sleep(min(1.0, self._limits.watchdog_s - silent))

    def _live_link(self) -> EngineLink:
        if self._link is None or self._state in {EngineState.STOPPED, EngineState.FAILED}:
            raise EngineUnavailable(
                f"{self.spec.model_id} on {self.spec.device}: {self._reason}",
                retry_after=self.status.retry_after,
            )
        return self._link

    async def embed(self, tokens: list[list[int]], *, deadline: float, interactive: bool = True) -> EmbeddingOutput:
        """See `Engine.embed`."""
        link = self._live_link()
        lengths = [len(row) for row in tokens]
        flat = np.fromiter(itertools.chain.from_iterable(tokens), TOKEN_DTYPE, count=sum(lengths))
        job = EmbedJob(next(self._ids), flat.tobytes(), lengths, deadline, interactive)
        sink = _EmbeddingSink()
        link.send(job, sink)
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                event = await sink.future
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the vectors were ready") from error
        finally:
            _abandon(link, job.id)
        vectors = np.frombuffer(event.vectors, VECTOR_DTYPE).reshape(len(lengths), -1)
        return EmbeddingOutput(vectors, event.started, event.inference_s, event.busy_us)

    async def generate(self, job: GenerateJob) -> AsyncGenerator[TokenDelta, None]:
        """See `Engine.generate`."""
        link = self._live_link()
        job = msgspec.structs.replace(job, id=next(self._ids))
        sink = _GenerationSink()
        link.send(job, sink)
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


class _EmbeddingSink:
    def __init__(self) -> None:
        self.future: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()

    def on_result(self, result: Embedded | TokenDelta) -> None:
        if isinstance(result, Embedded) and not self.future.done():
            self.future.set_result(result)

    def on_error(self, error: NodeError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _GenerationSink:
    """At most one generation's tokens wait here, so a slow reader holds a bounded list of integers and no more."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TokenDelta | NodeError] = asyncio.Queue()

    async def next(self) -> TokenDelta:
        item = await self._queue.get()
        if isinstance(item, NodeError):
            raise item
        return item

    def on_result(self, result: Embedded | TokenDelta) -> None:
        if isinstance(result, TokenDelta):
            self._queue.put_nowait(result)

    def on_error(self, error: NodeError) -> None:
        self._queue.put_nowait(error)
