"""A TCP proxy on loopback that does to replies what networks do. Requests pass unharmed, and probes unless asked."""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Fault:
    """What happens to each reply.

    `latency`: seconds before its first byte. `bandwidth`: bytes a second. `silent`: it never comes, the connection
    stays (half-open). `cut_after`: it ends after that many bytes, by a reset or, with `gently`, by a close.
    `instead`: these bytes come in its place. `before`: these bytes come first. `close_after`: seconds that the
    connection stays open after its sender closed it (slow close). `probes`: /health suffers as well. `each`: no fault,
    it is called with every chunk that its sender wrote, before anything is done to that.
    """

    latency: float = 0.0
    bandwidth: float | None = None
    silent: bool = False
    cut_after: int | None = None
    gently: bool = False
    instead: bytes | None = None
    before: bytes = b""
    close_after: float = 0.0
    probes: bool = False
    each: Callable[[bytes], object] | None = None


NO_FAULT = Fault()


class FaultProxy:
    """Stands in front of one server. Set `fault`; it holds from the next request on, also on open connections.

    `requests` counts requests other than probes, `paths` all by their path. `listen_on`: host and port, 0 for a free
    one.
    """

    def __init__(self, upstream: str, *, listen_on: tuple[str, int] = ("127.0.0.1", 0)):
        self.host, _, port = upstream.removeprefix("http://").partition(":")
        self.port = int(port)
        self.fault = NO_FAULT
        self.requests = 0
        self.paths: Counter[str] = Counter()
        self.url = ""
        self._listen_host, self._listen_port = listen_on
        self._server = None
        self._kept = None
        self._connections: set[asyncio.Task] = set()

    @property
    def listening(self):
        return self._server is not None

    @asynccontextmanager
    async def running(self):
        await self.listen()
        try:
            yield self
        finally:
            await self.stop()
            self._kept.close()

    async def listen(self):
        if self._kept is not None:
            self._kept.close()
        # As many as a node lets wait: with fewer, a burst of connections is slowed down by repeated SYNs.
        self._server = await asyncio.start_server(self._accept, self._listen_host, self._listen_port, backlog=1024)
        self._listen_port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{self._listen_host}:{self._listen_port}"

    async def stop(self):
        """Refuse connections and reset those that are open: the host is dead."""
        if not self.listening:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None
        # Bound and not listening: connections are refused, and the kernel gives the port to none.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind((self._listen_host, self._listen_port))

    async def _accept(self, reader, writer):
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            await self._join(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # `stop` cancels; asyncio's streams of 3.11 take a handler that ends cancelled for a failure and print it.
            pass
        finally:
            self._connections.discard(task)
            _reset(writer)

    async def _join(self, reader, writer):
        there, back = await asyncio.open_connection(self.host, self.port)
        reply = _Reply(self, back, writer)
        try:
            async with asyncio.TaskGroup() as group:
                answering = group.create_task(reply.forward(there))
                while data := await reader.read(_CHUNK):
                    reply.request(data)
                    back.write(data)
                    await back.drain()
                answering.cancel()
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            back.close()


class _Reply:
    def __init__(self, proxy, back, writer):
        self.proxy = proxy
        self.back = back
        self.writer = writer
        self.fault = NO_FAULT
        self.sent = 0
        self.begun = False

    def request(self, data):
        """A request goes up: what happens to its reply is settled now."""
        if data.startswith((b"GET ", b"POST ")):
            probe = data.startswith(b"GET /health")
            self.proxy.requests += not probe
            self.proxy.paths[data.split(b" ", 2)[1].decode(errors="replace")] += 1
            self.fault = self.proxy.fault if self.proxy.fault.probes or not probe else NO_FAULT
            self.sent, self.begun = 0, False

    async def forward(self, reader):
        while data := await reader.read(_CHUNK):
            fault = self.fault
            if fault.silent:
                continue
            if fault.each:
                fault.each(data)
            if not self.begun:
                self.begun = True
                await asyncio.sleep(fault.latency)
                if fault.instead is not None:
                    self.writer.write(fault.instead)
                    await self.writer.drain()
                    raise ConnectionAbortedError
                data = fault.before + data
            await self._send(data, fault)
        await asyncio.sleep(self.fault.close_after)
        self.writer.close()

    async def _send(self, data, fault):
        if fault.cut_after is not None and self.sent + len(data) >= fault.cut_after:
            self.writer.write(data[: fault.cut_after - self.sent])
            await self.writer.drain()
            if fault.gently:
                self.writer.close()
            raise ConnectionAbortedError
        step = len(data) if fault.bandwidth is None else max(1, int(fault.bandwidth / 50))
        for start in range(0, len(data), step):
            part = data[start : start + step]
            self.writer.write(part)
            await self.writer.drain()
            self.sent += len(part)
            if fault.bandwidth is not None:
                await asyncio.sleep(len(part) / fault.bandwidth)


def _reset(writer):
    """Close at once, with a reset where the system can send one."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
