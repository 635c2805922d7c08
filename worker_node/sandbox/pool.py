"""A few killable processes, a bounded queue before them, limits on every call, and a cache of their results."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from worker_node.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineUnavailable,
    InternalError,
    Overloaded,
    reported_error,
)
from worker_node.core.operating_system import ENDED_BY_OTHERS, OUT_OF_TIME, start_module
from worker_node.sandbox.worker import Call, CallFailed, CallRefused, OutOfMemory, Reply, Returned, encode, replies

log = logging.getLogger(__name__)


class ProcessEnded(Exception):
    """The process ended during a call; its argument is the exit status, negative for a signal."""


@dataclass(frozen=True, slots=True)
class PreparationLimits:
    """`cpu_s` and `memory_bytes` (address space) bound one call, which is refused beyond them.

    `wall_s` is for a process that waits or a machine that stands still, which is not the call's fault. At most `queue`
    calls wait.
    """

    processes: int = 1
    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_bytes: int = 512 * 1024 * 1024
    queue: int = 64


class _Process:
    """A process that serves one call at a time; used by one thread, but for killing it."""

    def __init__(self, memory_bytes: int, modules: Sequence[str]) -> None:
        self.popen, link = start_module("worker_node.sandbox.worker", memory_bytes, *modules)
        self._connection = Connection(link().detach())

    def call(self, body: bytes, wall_s: float) -> Reply | None:
        """The reply to one call; None, and the process is killed, if there is none in time. Raises ProcessEnded."""
        try:
            self._connection.send_bytes(body)
            if not self._connection.poll(wall_s):
                self.popen.kill()
                return None
            reply: Reply = replies.decode(self._connection.recv_bytes())
            return reply
        except (EOFError, OSError):
            raise ProcessEnded(self.end()) from None

    def end(self) -> int:
        """End the process and return its exit status, which is its own if it is ending by itself."""
        self._connection.close()
        try:
            return self.popen.wait(0.1)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


class PreparationPool:
    """Runs functions on plain values in processes of its own. `modules` are imported before the first call.

    Each process belongs to a thread, which waits for its replies; a process that ended is replaced by the next call.
    """

    def __init__(self, limits: PreparationLimits, modules: Sequence[str] = ()) -> None:
        self._limits = limits
        self._modules = tuple(modules)
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix="prepare")
        self._own = threading.local()
        self._processes: set[_Process] = set()
        self._outstanding = 0
        self._closed = False

    async def start(self) -> None:
        """Start a process, which imports meanwhile. Without it the first call does."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._process)

    async def close(self) -> None:
        """End the processes; calls in flight fail."""
        self._closed = True
        for process in tuple(self._processes):
            process.popen.kill()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.gather(*(asyncio.to_thread(process.end) for process in self._processes))
        self._processes.clear()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(process.popen.pid for process in tuple(self._processes))

    async def run(self, function: Callable[..., Any], *arguments: Any, deadline: float, param: str) -> Any:
        """Return what `function`, a module's own, returns for plain arguments.

        `param` is the part of the request that is prepared; `deadline` is monotonic seconds. Raises BadRequest when the
        call exceeds its time or memory or crashes its process, and what the function raises of `NodeError`; Overloaded,
        DeadlineExceeded, EngineUnavailable when it did not run to its end for another reason.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        body = encoded(Call(name, list(arguments), self._limits.cpu_s), param)
        if self._outstanding >= self._limits.processes + self._limits.queue:
            waiting = self._outstanding - self._limits.processes
            raise Overloaded(f"{waiting} requests wait to be prepared; the bound here is {self._limits.queue}")
        self._outstanding += 1
        try:
            reply = await self._reply(body, deadline, param)
        finally:
            self._outstanding -= 1
        match reply:
            case Returned(value):
                return value
            case CallRefused(code, message, place):
                raise reported_error(code, message, param=place)
            case OutOfMemory():
                raise BadRequest.at(
                    param, f"preparing it takes more memory than the bound, {self._limits.memory_bytes >> 20} MiB"
                )
            case CallFailed(where):
                log.error("preparing a request failed: %s", where)
                raise InternalError(f"preparing {param} failed; this is a bug, see the node's log")

    async def _reply(self, body: bytes, deadline: float, param: str) -> Reply:
        """Run a call; once more where somebody else ended the process, which is not the call's doing."""
        for _ in range(2):
            try:
                return await self._exchange(body, deadline, param)
            except ProcessEnded as ended:
                (status,) = ended.args
            # Windows has one status for this and for what `close` does.
            if status == OUT_OF_TIME and not self._closed:
                bound = f"{self._limits.cpu_s:g} s of CPU time, the bound here"
                raise BadRequest.at(param, f"preparing it takes more than {bound}")
            # 0: its status is not known.
            if status not in {*ENDED_BY_OTHERS, 0}:
                log.error("a preparation process ended with status %s on %s", status, param)
                raise BadRequest.at(param, "it crashed the process that prepared it; change it before trying again")
        raise EngineUnavailable(f"the process that prepared {param} was killed; the request can be sent again")

    async def _exchange(self, body: bytes, deadline: float, param: str) -> Reply:
        if self._closed:
            raise EngineUnavailable("the node is stopping")
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._run, body)
        working.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({working}, timeout=max(0.0, deadline - time.monotonic()))
            if not working.done():
                raise DeadlineExceeded(f"the deadline passed while {param} was prepared", param=param)
        finally:
            working.cancel()  # one that has begun goes on to its end, within its limits
        if working.cancelled():
            raise EngineUnavailable("the node is stopping")
        reply = working.result()
        if reply is None:
            raise EngineUnavailable(
                f"preparing {param} did not end within {self._limits.wall_s:g} s; the request can be sent again"
            )
        return reply

    def _run(self, body: bytes) -> Reply | None:
        process = self._process()
        try:
            return process.call(body, self._limits.wall_s)
        except ProcessEnded:
            self._processes.discard(process)
            raise

    def _process(self) -> _Process:
        """The process of this thread; a new one if the last one has ended. Raises EngineUnavailable."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is not None and process in self._processes:
            if process.popen.poll() is None:
                return process
            process.end()
            self._processes.discard(process)
        if self._closed:
            raise EngineUnavailable("the node is stopping")
        try:
            process = self._own.process = _Process(self._limits.memory_bytes, self._modules)
        except OSError as error:
            raise EngineUnavailable(f"a preparation process could not be started: {error.strerror or error}") from error
        self._processes.add(process)
        return process


def encoded(value: Any, param: str) -> bytes:
    """The bytes of a part of the request. Raises BadRequest for what has no form."""
    try:
        return encode(value)
    except (ValueError, OverflowError, RecursionError):
        raise BadRequest.at(param, "a number in it is too large, or it is nested too deeply") from None


class ResultCache:
    """Results by key, the least recently used first out; a refusal is one too. Each is computed once at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._size = 0
        self._results: OrderedDict[bytes, str | BadRequest] = OrderedDict()
        self._making: dict[bytes, asyncio.Task[str]] = {}

    async def get(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        """The result for a key; `make` is called where there is none. Raises what `make` raises."""
        if key in self._results:
            self._results.move_to_end(key)
            kept = self._results[key]
            if isinstance(kept, BadRequest):
                # A new one each time: an error carries the model and device of one request.
                raise type(kept)(kept.message, param=kept.param)
            return kept
        if key not in self._making:
            task = self._making[key] = asyncio.create_task(self._made(key, make))
            task.add_done_callback(lambda ended: self._making.pop(key) and (ended.cancelled() or ended.exception()))
        return await asyncio.shield(self._making[key])

    async def _made(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        try:
            result = await make()
        except BadRequest as error:
            self._keep(key, type(error)(error.message, param=error.param))
            raise
        self._keep(key, result)
        return result

    def _keep(self, key: bytes, result: str | BadRequest) -> None:
        self._results[key] = result
        self._size += _bytes(key, result)
        while self._size > self._most:
            self._size -= _bytes(*self._results.popitem(last=False))


def _bytes(key: bytes, result: str | BadRequest) -> int:
    return len(key) + len(result if isinstance(result, str) else result.message) + 100
