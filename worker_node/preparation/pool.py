"""A few preparation processes, a bounded queue before them, and limits on every call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from worker_node.core import errors
from worker_node.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineUnavailable,
    InternalError,
    NodeError,
    Overloaded,
)
from worker_node.preparation.messages import Call, CallFailed, CallRefused, OutOfMemory, Reply, Returned, frame
from worker_node.preparation.process import PreparationProcess, ProcessEnded

log = logging.getLogger(__name__)

_REFUSALS: dict[str, type[NodeError]] = {
    error.code: error
    for error in (
        errors.BadRequest,
        errors.ContextLengthExceeded,
        errors.InsufficientStorage,
        errors.PayloadTooLarge,
        errors.UnsupportedParameter,
    )
}
Spawn = Callable[[int, Sequence[str]], Awaitable[PreparationProcess]]


@dataclass(frozen=True, slots=True)
class PreparationLimits:
    """`cpu_s` and `memory_bytes` (address space) bound one call, which is refused beyond them.

    `wall_s` is for a process that waits or a machine that stands still, which is not the call's fault. At most `queue`
    calls wait. A call whose caller has left may take `grace_s` to its end before its process is killed.
    """

    processes: int = 1
    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_bytes: int = 512 * 1024 * 1024
    queue: int = 64
    grace_s: float = 0.1


class PreparationPool:
    """Runs functions on plain values in processes of its own. `modules` are imported before the first call."""

    def __init__(
        self, limits: PreparationLimits, modules: Sequence[str] = (), spawn: Spawn = PreparationProcess.spawn
    ) -> None:
        self._limits = limits
        self._modules = tuple(modules)
        self._spawn = spawn
        self._idle: asyncio.Queue[PreparationProcess] = asyncio.Queue()
        self._waiting = 0
        self._processes: set[PreparationProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._closed = False

    async def start(self) -> None:
        """Start the processes, which import meanwhile. Without it they are started by the first call."""
        self._started = True
        await asyncio.gather(*(self._add_process() for _ in range(self._limits.processes)))

    async def close(self) -> None:
        """End the processes; calls in flight fail."""
        self._closed = True
        await asyncio.gather(*(process.end() for process in self._processes))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A process that was being started when this began.
        await asyncio.gather(*(process.end() for process in self._processes))
        self._processes.clear()

    @property
    def pids(self) -> frozenset[int]:
        """The ids of the processes that live now."""
        return frozenset(process.pid for process in self._processes)

    async def run(self, function: Callable[..., Any], *arguments: Any, deadline: float, param: str) -> Any:
        """Return what `function`, a module's own, returns for plain arguments.

        `param` is the part of the request that is prepared; `deadline` is monotonic seconds. Raises BadRequest when the
        call exceeds its time or memory or crashes its process, and what the function raises of `NodeError`; Overloaded,
        DeadlineExceeded, EngineUnavailable when it did not run to its end for another reason.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        try:
            call = frame(Call(name, list(arguments), self._limits.cpu_s))
        except (ValueError, OverflowError, RecursionError):
            raise BadRequest(f"{param}: a number in it is too large, or it is nested too deeply", param=param) from None
        try:
            return self._value(await self._exchange(call, deadline, param), param)
        except ProcessEnded as ended:
            if not ended.killed_from_outside:
                raise self._refusal(ended, param) from None
        # Not this call's doing, and most likely before it began: once more.
        try:
            return self._value(await self._exchange(call, deadline, param), param)
        except ProcessEnded as ended:
            raise self._refusal(ended, param) from None

    async def _exchange(self, call: bytes, deadline: float, param: str) -> Reply:
        """Have one process run a call. Raises ProcessEnded."""
        process = await self._acquire(deadline)
        # Apart from the caller, who may leave: then the process is still in the middle of the call.
        exchange = asyncio.create_task(process.call(call))
        exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(self._limits.wall_s, left)):
                reply = await asyncio.shield(exchange)
        except ProcessEnded:
            self._replace(process)
            raise
        except TimeoutError:
            self._task(self._leave(process, exchange))
            # Not by the clock: a timer may fire a little early.
            if left <= self._limits.wall_s:
                raise DeadlineExceeded(f"the deadline passed while {param} was prepared", param=param) from None
            raise EngineUnavailable(
                f"preparing {param} did not end within {self._limits.wall_s:g} s; the request can be sent again"
            ) from None
        except BaseException:
            self._task(self._leave(process, exchange))
            raise
        self._idle.put_nowait(process)
        return reply

    async def _acquire(self, deadline: float) -> PreparationProcess:
        while True:
            process = await self._next_idle(deadline)
            if process.alive:
                return process
            # Killed while it was idle: no call's doing, and no call has to notice.
            await process.end()
            self._replace(process)

    async def _next_idle(self, deadline: float) -> PreparationProcess:
        if self._closed:
            raise EngineUnavailable("the node is stopping")
        if not self._started:
            await self.start()
        if self._idle.empty():
            if self._waiting >= self._limits.queue:
                raise Overloaded(
                    f"{self._waiting} requests wait to be prepared; the bound here is {self._limits.queue}"
                )
            self._waiting += 1
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await self._idle.get()
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed while the request waited to be prepared") from None
            finally:
                self._waiting -= 1
        return self._idle.get_nowait()

    def _value(self, reply: Reply, param: str) -> Any:
        match reply:
            case Returned(value):
                return value
            case CallRefused(code, message, place):
                raise _REFUSALS.get(code, InternalError)(message, param=place)
            case OutOfMemory():
                raise BadRequest(
                    f"{param}: preparing it takes more memory than the bound, {self._limits.memory_bytes >> 20} MiB",
                    param=param,
                )
            case CallFailed(where):
                log.error("preparing a request failed: %s", where)
                raise InternalError(f"preparing {param} failed; this is a bug, see the node's log")

    def _refusal(self, ended: ProcessEnded, param: str) -> NodeError:
        if ended.out_of_time:
            return BadRequest(
                f"{param}: preparing it takes more than {self._limits.cpu_s:g} s of CPU time, the bound here",
                param=param,
            )
        if ended.killed_from_outside:
            return EngineUnavailable(f"the process that prepared {param} was killed; the request can be sent again")
        log.error("a preparation process ended with status %s on %s", ended.status, param)
        return BadRequest(
            f"{param}: it crashed the process that prepared it; change it before trying again", param=param
        )

    async def _leave(self, process: PreparationProcess, exchange: asyncio.Task[Reply]) -> None:
        """After its caller has left, let a call end soon, or end its process."""
        done, _ = await asyncio.wait({exchange}, timeout=self._limits.grace_s)
        if done and exchange.exception() is None:
            self._idle.put_nowait(process)
            return
        exchange.cancel()
        await asyncio.gather(exchange, return_exceptions=True)
        await process.end()
        self._replace(process)

    def _replace(self, process: PreparationProcess) -> None:
        self._processes.discard(process)
        if not self._closed:
            self._task(self._add_process())

    async def _add_process(self) -> None:
        delay = 0.1
        while True:
            try:
                process = await self._spawn(self._limits.memory_bytes, self._modules)
            except OSError as error:
                log.error("a preparation process could not be started: %s; trying again in %g s", error, delay)
                await asyncio.sleep(delay)
                delay = min(5.0, 2 * delay)
                continue
            self._processes.add(process)
            self._idle.put_nowait(process)
            return

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
