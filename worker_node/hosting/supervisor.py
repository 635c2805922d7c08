"""Keeps one engine alive over many lives of its process, and is the `Engine` that the node calls.

Death is seen by the closing of the socket, a hang by `liveness.py`. After either, the engine
is started again as `restart.py` decides. It is `ready` only after its canary has passed; one that fails, then or later,
quarantines the engine at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextvars import ContextVar

import msgspec
import numpy as np

from worker_node.engines.base import CanaryProof, EmbeddingOutput, EngineState, EngineStatus
from worker_node.engines.messages import (
    VECTOR_DTYPE,
    Cancel,
    EngineSpec,
    EngineStats,
    GenerateJob,
    Loaded,
    TokenDelta,
    embed_job,
)
from worker_node.errors import DeadlineExceeded, EngineUnavailable
from worker_node.hosting.life import Canary, End, EngineLife, HostingLimits
from worker_node.hosting.link import EngineLink
from worker_node.hosting.liveness import CallTimes, Liveness
from worker_node.hosting.restart import RestartPolicy, Verdict
from worker_node.hosting.sinks import EmbeddingSink, GenerationSink
from worker_node.hosting.suspicion import Suspects

log = logging.getLogger(__name__)

# Set in the canary's context: its questions are known to be harmless, so no death of an engine is theirs.
_examining: ContextVar[bool] = ContextVar("examining", default=False)
_DOWN = frozenset({EngineState.BACKING_OFF, EngineState.QUARANTINED, EngineState.FAILED})


class SupervisedEngine:
    """An `Engine` in a child process that is restarted when it dies or hangs.

    A `lazy` one stays unloaded until `wake` is called. `standby` is woken when this engine cannot serve any more.
    """

    def __init__(
        self,
        spec: EngineSpec,
        canary: Canary,
        limits: HostingLimits,
        *,
        lazy: bool = False,
        standby: SupervisedEngine | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.spec = spec
        self.lazy = lazy
        self._standby = standby
        self._canary = canary
        self._limits = limits
        self._policy = RestartPolicy(limits.restart)
        self._times = CallTimes()
        self._suspects = Suspects() if suspects is None else suspects
        self._ids = itertools.count(1)
        self._link: EngineLink | None = None
        self._state = EngineState.UNLOADED if lazy else EngineState.STARTING
        self._reason: str | None = "it is loaded when first needed" if lazy else "loading"
        self._loaded: Loaded | None = None
        self._proof: CanaryProof | None = None
        self._life = EngineLife(spec, limits, self._examine, self._on_ready)
        self._restarts = 0
        self._wrong = 0
        self._resume_at: float | None = None
        self._ready_at: float | None = None
        self._request_to_blame = False
        self._task: asyncio.Task[None] | None = None
        self._reaping: set[asyncio.Task[None]] = set()
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
            wrong=self._wrong,
            load_seconds=self._loaded.seconds if self._loaded else None,
            device_name=self._loaded.device_name if self._loaded else None,
            retry_after=retry_after,
            in_flight=self._link.in_flight if self._link else 0,
            proof=self._proof,
            stats=self._link.stats if self._link else EngineStats(),
        )

    def start(self) -> None:
        """Begin to run and supervise the engine process; a lazy one waits for `wake`."""
        if not self.lazy:
            self._begin()

    def wake(self) -> None:
        """Load the engine if it is not: returns at once, `settled` waits."""
        if self._state is EngineState.UNLOADED:
            self._begin()

    def _begin(self) -> None:
        self._set(EngineState.STARTING, "loading")
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.model_id}")

    async def unload(self) -> bool:
        """End the process until `wake` is called; False, and nothing done, while it holds jobs or is not ready."""
        if self._task is None or self._state is not EngineState.READY or self.status.in_flight:
            return False
        self._set(EngineState.UNLOADED, "it was unloaded; it is loaded again when needed")
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def settled(self) -> EngineStatus:
        """See `Engine.settled`."""
        while self._state is EngineState.STARTING:
            await self.next_change()
        return self.status

    def next_change(self) -> Coroutine[None, None, object]:
        """See `Engine.next_change`."""
        return self._changed.wait()

    async def stop(self) -> None:
        """End the engine process for good."""
        link = self._link
        self._set(EngineState.STOPPED, "the node is shutting down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if link is not None:
            await link.shut_down(self._limits.stop_timeout_s)
        await asyncio.gather(*self._reaping)

    def _set(self, state: EngineState, reason: str | None) -> None:
        if self._state is not EngineState.STOPPED:
            self._state, self._reason = state, reason
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._standby is not None and state in _DOWN:
            self._standby.wake()

    async def _supervise(self) -> None:
        while True:
            self._ready_at, self._request_to_blame = None, False
            try:
                end, reason = await self._live()
            except Exception as error:
                # Whatever it was, an engine that nobody supervises would be lost for the life of the node.
                log.exception("engine %s on %s: its supervision failed", self.spec.model_id, self.spec.device)
                end, reason = End.CRASHED, f"its supervision failed ({type(error).__name__}; the log has more)"
            if end is End.IDLE:
                return
            if end is End.HOPELESS:
                log.error("engine %s on %s %s", self.spec.model_id, self.spec.device, reason)
                # A driver may come up, memory may become free, a file may be repaired while the node runs.
                await self._pause(EngineState.FAILED, reason, self._limits.restart.quarantine_s)
                continue
            verdict = self._judge(end, reason)
            if verdict.quarantined:
                self._suspects.clear()
            log.warning(
                "engine %s on %s ended: %s; next start in %.1f s",
                self.spec.model_id,
                self.spec.device,
                verdict.reason,
                verdict.delay,
            )
            state = EngineState.QUARANTINED if verdict.quarantined else EngineState.BACKING_OFF
            await self._pause(state, verdict.reason, verdict.delay)

    def _judge(self, end: End, reason: str) -> Verdict:
        """Count an end that was not asked for, and decide when to start again."""
        self._restarts += 1
        if end is End.WRONG:
            self._proof = None
            self._wrong += 1
            return self._policy.distrusted(reason)
        if self._request_to_blame:
            return self._policy.blameless(reason)
        now = time.monotonic()
        return self._policy.crashed(now, reason, served_s=0.0 if self._ready_at is None else now - self._ready_at)

    async def _pause(self, state: EngineState, reason: str, delay: float) -> None:
        """Be in `state` for `delay` seconds, then start again."""
        self._resume_at = time.monotonic() + delay
        self._set(state, reason)
        await asyncio.sleep(delay)
        self._resume_at = None
        self._set(EngineState.STARTING, "starting again after: " + reason)

    async def _live(self) -> tuple[End, str]:
        liveness = Liveness(self._limits.liveness, self._times, time.monotonic())
        link = self._link = await EngineLink.spawn(self.spec, liveness, self._suspects)
        try:
            end, reason = await self._life.run(link)
            self._request_to_blame = link.request_to_blame
            if end is End.IDLE:
                # Before the process is gone, so that whoever needs the engine meanwhile can have it loaded again.
                self._set(EngineState.UNLOADED, reason)
                log.info("engine %s on %s is unloaded: %s", self.spec.model_id, self.spec.device, reason)
            return end, reason
        finally:
            if self._state is not EngineState.STOPPED:
                self._link = None
                reaping = asyncio.create_task(self._reap(link), name=f"reap {self.spec.model_id}")
                self._reaping.add(reaping)
                reaping.add_done_callback(self._reaping.discard)
                # Being stopped in the middle must not leave a process that nobody waits for: `stop` waits for the task.
                await asyncio.shield(reaping)

    async def _reap(self, link: EngineLink) -> None:
        status = await link.reap()
        log.info("engine %s on %s: exit status %s", self.spec.model_id, self.spec.device, status)

    def _on_ready(self) -> None:
        self._ready_at = time.monotonic()
        self._set(EngineState.READY, None)

    async def _examine(self, loaded: Loaded) -> None:
        self._loaded = loaded
        token = _examining.set(True)
        try:
            await self._canary(self)
        finally:
            _examining.reset(token)
        self._proof = CanaryProof(time.time(), loaded.device_name, loaded.driver, loaded.runtime)

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
        job = embed_job(next(self._ids), tokens, deadline, interactive=interactive)
        sink = EmbeddingSink()
        link.send(job, sink, suspect=not _examining.get())
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                event = await sink.future
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the vectors were ready") from error
        finally:
            _abandon(link, job.id)
        vectors = np.frombuffer(event.vectors, VECTOR_DTYPE).reshape(len(tokens), -1)
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

    async def generate(self, job: GenerateJob) -> AsyncGenerator[TokenDelta, None]:
        """See `Engine.generate`."""
        link = self._live_link()
        job = msgspec.structs.replace(job, id=next(self._ids))
        sink = GenerationSink()
        link.send(job, sink, suspect=not _examining.get())
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
