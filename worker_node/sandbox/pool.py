"""A few killable processes, a bounded queue before them, limits on every call, and a cache of their results."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections import OrderedDict
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
from worker_node.core.operating_system import call_when_ended, start_module
from worker_node.sandbox.worker import (
    LENGTH,
    Call,
    CallFailed,
    CallRefused,
    OutOfMemory,
    Reply,
    Returned,
    frame,
    replies,
)


class ProcessEnded(Exception):
    """The process ended during a call. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    @property
    def out_of_time(self) -> bool:
        """Whether the call used up its CPU time."""
        return self.status == -signal.SIGPROF

    @property
    def killed_from_outside(self) -> bool:
        """Whether somebody else ended it: the kernel for want of memory, an operator, or its status is not known."""
        return self.status in {-signal.SIGKILL, -signal.SIGTERM, 0}


class PreparationProcess:
    """Make it with `spawn`. It serves one call at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        # A process that ends between calls is reaped at once, and not by the next call.
        self._forget = call_when_ended(process.pid, process.poll)

    @classmethod
    async def spawn(cls, memory_bytes: int, modules: Sequence[str]) -> PreparationProcess:
        """Start a process. It dies with this one, and knows none of the node's secrets."""
        process, ours = start_module("worker_node.sandbox.worker", memory_bytes, *modules)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as the kernel says."""
        return self._process.poll() is None

    async def call(self, frame: bytes) -> Reply:
        """Send one call and wait for its reply. Raises ProcessEnded.

        When this is cancelled, the process is in the middle of a call: `end` is all that is left to do with it.
        """
        try:
            self._writer.write(frame)
            await self._writer.drain()
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessEnded(await self.end()) from None
        reply: Reply = replies.decode(body)
        return reply

    async def end(self) -> int:
        """End the process at once and return its exit status, which is its own if it had ended already."""
        self._writer.close()
        self._forget()
        # A process that closed its end is ending by itself, and its own status says why.
        try:
            return await asyncio.to_thread(self._process.wait, 0.1 if self._reader.at_eof() else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)


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


@dataclass(slots=True)
class _Flight:
    """Work that `waiters` requests wait for."""

    task: asyncio.Task[str]
    waiters: int = 0


class ResultCache:
    """Texts by key, least recently used first out, at most `max_bytes` of them. A refusal is a result too.

    Each is computed once, however many requests need it at the same time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._size = 0
        self._results: OrderedDict[bytes, str | tuple[type[BadRequest], str, str | None]] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}
        self.hits = 0
        self.misses = 0

    async def get(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        """The result for a key; `make` is called where there is none, and cancelled when its last caller leaves.

        Raises what `make` raises.
        """
        if key in self._results:
            self.hits += 1
            self._results.move_to_end(key)
            return _result(self._results[key])
        self.misses += 1
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._made(key, make)))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    async def _made(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        task = asyncio.current_task()
        try:
            result = await make()
        except BadRequest as error:
            self._keep(key, (type(error), error.message, error.param))
            raise
        else:
            self._keep(key, result)
            return result
        finally:
            if (flight := self._flights.get(key)) is not None and flight.task is task:
                del self._flights[key]

    def _keep(self, key: bytes, result: str | tuple[type[BadRequest], str, str | None]) -> None:
        self._results[key] = result
        self._size += _bytes(key, result)
        while self._size > self._most:
            old, value = self._results.popitem(last=False)
            self._size -= _bytes(old, value)


def _result(kept: str | tuple[type[BadRequest], str, str | None]) -> str:
    if isinstance(kept, str):
        return kept
    kind, message, param = kept
    # A new one each time: an error carries what befell one request.
    raise kind(message, param=param)


def _bytes(key: bytes, result: str | tuple[type[BadRequest], str, str | None]) -> int:
    return len(key) + len(result if isinstance(result, str) else result[1]) + 100
