"""One life of one engine process, as the edge process sees it: from spawn to death.

The link knows which jobs the engine holds. When the process dies, its end of the socket pair closes, and every job
it held fails at once; nobody waits for a timeout to learn of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import cast

from worker_node import errors
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
    Result,
    Results,
    Shutdown,
    submission,
)
from worker_node.environment import native_environment
from worker_node.errors import EngineDied, EngineUnavailable, NodeError, RequestBreaksEngine
from worker_node.hosting.liveness import Liveness
from worker_node.hosting.sinks import JobSink
from worker_node.hosting.suspicion import OnBoard, Standing, Suspects, fingerprint
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


@dataclass(slots=True)
class _Held:
    """A job that the engine holds; `fresh` until something has come of it. The canary's is never `suspect`."""

    job: Job
    sink: JobSink
    suspect: bool
    fresh: bool = True


class EngineLink(asyncio.Protocol):
    """A running engine process and the socket to it. Make it with `spawn`."""

    def __init__(self, spec: EngineSpec, liveness: Liveness, suspects: Suspects) -> None:
        self._spec = spec
        self._suspects = suspects
        self.liveness = liveness
        self._buffer = FrameBuffer()
        self._jobs: dict[int, _Held] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._call: NativeCall | None = None
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self._closed: asyncio.Future[str] = loop.create_future()
        self.accepted = 0
        self._kill_reason: str | None = None
        self._blameless = False
        self.request_to_blame = False
        self.stats = EngineStats()

    @classmethod
    async def spawn(cls, spec: EngineSpec, liveness: Liveness, suspects: Suspects) -> EngineLink:
        """Start the engine process, which loads its model after `begin`."""
        link = cls(spec, liveness, suspects)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # S603: the command is this interpreter and a module of ours.
                link._process = subprocess.Popen(  # noqa: S603, ASYNC220  (fork and exec take a millisecond)
                    [
                        sys.executable,
                        "-m",
                        "worker_node.hosting.child",
                        str(theirs.fileno()),
                        str(os.getpid()),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=native_environment(),
                )
            except BaseException:
                ours.close()
                raise
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
        """Whether the engine process can still be spoken to."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def in_flight(self) -> int:
        """How many jobs the engine holds."""
        return len(self._jobs)

    def submit(self, job: Job, sink: JobSink, *, suspect: bool) -> None:
        """Hand over a job; its results go to `sink` until it ends. Raises EngineUnavailable when the link is down."""
        self.send(submission(job))
        self.accepted += 1
        self._jobs[job.id] = _Held(job, sink, suspect)
        self._idle.clear()

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineUnavailable when the link is down."""
        if not self.up:
            raise EngineUnavailable(f"{self._spec.model_id} on {self._spec.device}: the engine process has ended")
        self._write(encode(command))

    def forget(self, job_id: int) -> bool:
        """Drop a job's sink; True if the engine still held the job."""
        return self._release(job_id) is not None

    async def drained(self) -> None:
        """Wait until the engine holds no job."""
        await self._idle.wait()

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Kill the process at once; `reason` is what its callers and /health will be told.

        With `blameless` no request that the engine holds is suspected for it.
        """
        self._kill_reason = reason
        self._blameless = blameless
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    async def shut_down(self, timeout: float) -> None:
        """Ask the engine to end, and kill it if it has not within `timeout` seconds."""
        self._blameless = True
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
                self.liveness.heard(now)
                self._dispatch(event)
        except CorruptFrame as error:
            self.kill(f"sent a corrupt frame ({error})")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._read_last_words()
        reason = self._kill_reason or "the engine process died"
        if not self.loaded.done():
            self.loaded.set_exception(self._died(reason))
            self.loaded.exception()  # somebody may have stopped waiting for it
        jobs, self._jobs = self._jobs, {}
        self._idle.set()
        if not self._blameless:
            self._suspect(jobs)
        for held in jobs.values():
            held.sink.on_error(self._fate(held, reason))
        self._closed.set_result(reason)

    def _read_last_words(self) -> None:
        """Read what the engine sent before it ended: a failed write to it closes the transport with that unread.

        It may be the announcement that tells which request is to blame.
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
                    self._deliver(result)
            case Failed():
                held = self._release(event.id)
                if held is not None:
                    held.sink.on_error(_ERRORS.get(event.code, errors.InternalError)(event.message))
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
                self.liveness.beat(event.stats.oldest_run, event.stats.last_run)
            case NativeCall():
                self._call = event
                self.liveness.called(event.stage, event.units, time.monotonic())

    def _deliver(self, result: Result) -> None:
        # A job that was given up meanwhile has no sink any more: its results have nowhere to go.
        held = self._release(result.id) if result.last else self._jobs.get(result.id)
        if held is not None:
            held.fresh = False
            held.sink.on_result(result)
            if result.last and self._suspects:
                self._suspects.answered(fingerprint(held.job))

    def _release(self, job_id: int) -> _Held | None:
        held = self._jobs.pop(job_id, None)
        if not self._jobs:
            self._idle.set()
        return held

    def _suspect(self, jobs: dict[int, _Held]) -> None:
        """Note which requests may have caused the end of the engine."""
        jobs = {job_id: held for job_id, held in jobs.items() if held.suspect}
        if not jobs:
            return
        keys = {job_id: fingerprint(held.job) for job_id, held in jobs.items()}
        call = self._call
        self.request_to_blame = self._suspects.died(
            [OnBoard(keys[job_id], held.fresh) for job_id, held in jobs.items()],
            {keys[job_id] for job_id in call.jobs if job_id in keys} if call else (),
            preparing=call is not None and call.stage == "prepare" and any(job_id in keys for job_id in call.jobs),
        )

    def _fate(self, held: _Held, reason: str) -> NodeError:
        """What a job is told that the engine took with it."""
        if held.suspect and self._suspects and self._suspects.standing(fingerprint(held.job)) is Standing.REFUSED:
            return RequestBreaksEngine(
                f"{self._spec.model_id} on {self._spec.device}: the request takes down the engine that runs it "
                f"({reason}); do not send it again"
            )
        return self._died(reason)

    def _died(self, what: str) -> EngineDied:
        return EngineDied(f"{self._spec.model_id} on {self._spec.device}: {what}; the request can be sent again")


class LoadRefused(Exception):
    """The engine reports that its model cannot be loaded on its device: an immediate restart would end the same way."""
