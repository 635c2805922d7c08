"""One life of one engine process, as the edge process sees it: from spawn to death.

The link knows which jobs the engine holds. When the process dies, its end of the socket pair closes and every job that
it held fails at once, without waiting for a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from typing import cast

from worker_node.core import errors
from worker_node.core.errors import EngineUnavailable, NodeError
from worker_node.core.operating_system import start_module
from worker_node.engines.messages import (
    Broken,
    Command,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    Heartbeat,
    Job,
    Loaded,
    LoadFailed,
    NativeCall,
    Results,
    Shutdown,
    submission,
)
from worker_node.hosting.cpu_turns import ALONE, CpuPlace
from worker_node.hosting.held import HeldJobs, engine_died
from worker_node.hosting.killing import KillWatch
from worker_node.hosting.liveness import Liveness
from worker_node.hosting.loading import stopped
from worker_node.hosting.sinks import JobSink
from worker_node.hosting.suspicion import Blame, Suspects
from worker_node.hosting.wire import CorruptFrame, FrameBuffer, decode_event, encode

_ERRORS: dict[str, type[NodeError]] = {
    cls.code: cls
    for cls in (
        errors.BadRequest,
        errors.ContextLengthExceeded,
        errors.DeadlineExceeded,
        errors.EngineUnavailable,
        errors.InternalError,
        errors.Overloaded,
        errors.UnsupportedParameter,
    )
}

_LAST_WORDS_BYTES = 1 << 16
# The kernel closes the socket of a process that ends shortly before its exit status is known.
_STATUS_WAIT_S = 1.0
_STATUS_LOOK_S = 0.001


class EngineLink(asyncio.Protocol):
    """A running engine process and the socket to it. Make it with `spawn`."""

    def __init__(
        self, spec: EngineSpec, liveness: Liveness, suspects: Suspects, kills: KillWatch, cpu: CpuPlace = ALONE
    ) -> None:
        self._spec = spec
        self.seat = cpu.seat()
        self.liveness = liveness
        self.kills = kills
        self._buffer = FrameBuffer()
        self._jobs = HeldJobs(spec, suspects, self.seat.ended)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self._closed: asyncio.Future[str] = loop.create_future()
        self.accepted = 0
        self._kill_reason: str | None = None
        self._blameless = False
        self.killed_from_outside = False
        self._inquest: asyncio.Task[None] | None = None
        self.stats = EngineStats()

    @classmethod
    async def spawn(
        cls, spec: EngineSpec, liveness: Liveness, suspects: Suspects, kills: KillWatch, cpu: CpuPlace = ALONE
    ) -> EngineLink:
        """Start the engine process, which loads its model after `begin`."""
        link = cls(spec, liveness, suspects, kills, cpu)
        link._process, ours = start_module("worker_node.hosting.child")
        link.seat.process = link._process
        ours.setblocking(False)
        link._socket = ours.dup()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException:
            link.kill("the node was stopped while it started")
            ours.close()
            link._socket.close()
            await link.reap()
            raise
        return link

    def begin(self) -> None:
        """Have the engine load its model; `loaded` resolves when the pipeline is up."""
        self._write(encode(self._spec))

    @property
    def pid(self) -> int | None:
        """The engine's process id while it lives."""
        return self._process.pid if self._process else None

    @property
    def up(self) -> bool:
        """Whether the engine process can still receive commands."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def blame(self) -> Blame:
        """What ended the engine."""
        return self._jobs.blame

    @property
    def in_flight(self) -> int:
        """How many jobs the engine holds."""
        return len(self._jobs)

    def submit(self, job: Job, sink: JobSink, *, suspect: bool) -> None:
        """Hand over a job; its results go to `sink` until it ends. Raises EngineUnavailable when the link is down."""
        self.send(submission(job))
        self.accepted += 1
        self._jobs.add(job, sink, suspect=suspect)
        self.seat.began(job)

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineUnavailable when the link is down."""
        if not self.up:
            raise EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: the engine process has ended")
        self._write(encode(command))

    def forget(self, job_id: int) -> bool:
        """Drop a job's sink; True if the engine still held the job."""
        return self._jobs.leave(job_id, time.monotonic())

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._jobs.drained()

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Kill the process at once; callers and /health get `reason`.

        With `blameless` no request that the engine holds becomes a suspect.
        """
        self._kill_reason = reason
        self._blameless = blameless
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def kill_hung(self, reason: str) -> None:
        """As `kill`, for a process that is silent.

        A process that was stopped (SIGSTOP) is treated as killed from outside.
        """
        self.killed_from_outside = stopped(self.pid) and not self.seat.paused
        if self.killed_from_outside:
            reason += "; the process was stopped from outside (SIGSTOP)"
        self.kill(reason, blameless=self.killed_from_outside)

    async def shut_down(self, timeout: float, reason: str | None = None) -> None:
        """See `EngineProcess.end`."""
        self._blameless = True
        if reason is not None:
            self._jobs.end(EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: {reason}"))
        self.seat.closed()
        with contextlib.suppress(EngineUnavailable):
            self.send(Shutdown())
        try:
            async with asyncio.timeout(timeout):
                await self.wait_closed()
        except TimeoutError:
            self.kill("did not end when asked")
        await self.reap()

    async def wait_closed(self) -> str:
        """Wait for the end of the engine process and return why it ended."""
        return await asyncio.shield(self._closed)

    async def reap(self) -> int | None:
        """Wait until the process is gone for good and return its exit status."""
        if self._process is None:
            return None
        if self._transport is not None:
            self._transport.close()
        # Its socket is closed, so it is ending: in native clean-up at worst, which must not hold us up for long.
        try:
            return await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for body in self._buffer.feed(data):
                event = decode_event(body)
                self.liveness.heard(self.seat.ran_until(now))
                self._dispatch(event)
        except CorruptFrame as error:
            self.kill(f"sent a corrupt frame ({error})")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self.seat.closed()
        self._read_last_words()
        reason = self._kill_reason or "the engine process died"
        if not self.loaded.done():
            self.loaded.set_exception(engine_died(self._spec, reason))
            self.loaded.exception()  # its caller may have stopped waiting for it
        if self._kill_reason is None and not self._blameless:
            self._inquest = asyncio.create_task(self._learn_cause(reason), name=f"cause of death {self._spec.model_id}")
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._jobs.engine_died(reason, blameless=self._blameless)
        self._closed.set_result(reason)

    async def _learn_cause(self, reason: str) -> None:
        """Fail the jobs once the exit status shows whether one of them, or the engine, can have caused the end."""
        try:
            async with asyncio.timeout(_STATUS_WAIT_S):
                while self._status() is None:  # noqa: ASYNC110  (no event tells of it but SIGCHLD, which is not ours)
                    await asyncio.sleep(_STATUS_LOOK_S)
            death = self.kills.verdict(self._status())
            reason, self.killed_from_outside = death.reason, death.from_outside
            self._blameless = death.from_outside
        except TimeoutError:
            pass
        finally:
            self._end(reason)

    def _status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def _read_last_words(self) -> None:
        """Read what the engine sent before it ended: a failed write to it closes the transport with that unread.

        It may be the announcement that shows which request is to blame.
        """
        if self._socket is None:
            return
        with self._socket as connection, contextlib.suppress(OSError):
            while data := connection.recv(_LAST_WORDS_BYTES):
                self.data_received(data)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Results():
                for result in event.results:
                    self._jobs.deliver(result)
            case Failed():
                sink = self._jobs.release(event.id)
                if sink is not None:
                    sink.put(_ERRORS.get(event.code, errors.InternalError)(event.message))
            case Loaded():
                if not self.loaded.done():
                    self.loaded.set_result(event)
            case LoadFailed():
                if not self.loaded.done():
                    self.loaded.set_exception(LoadRefused(event.message))
                    self.loaded.exception()
            case Broken():
                self.kill(event.message)
            case Heartbeat():
                self.stats = event.stats
                now, oldest = time.monotonic(), event.stats.oldest_run
                ran = None if oldest is None else (oldest[0], self.seat.ran_of(oldest[1], now))
                self.liveness.beat(ran, event.stats.last_run)
                self._jobs.beat(event, now)
            case NativeCall():
                self._jobs.called(event)
                self.liveness.called(event.stage, event.units, self.seat.ran_until(time.monotonic()))


class LoadRefused(Exception):
    """The engine reports that its model cannot be loaded on its device: an immediate restart would end the same way."""
