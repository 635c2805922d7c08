"""One preparation process, as the edge process sees it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Sequence

from worker_node.core.operating_system import call_when_ended, start_module
from worker_node.preparation.messages import LENGTH, Reply, replies


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
        process, ours = start_module("worker_node.preparation.worker", memory_bytes, *modules)
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
