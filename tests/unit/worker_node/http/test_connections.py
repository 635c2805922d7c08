"""Idle and slow connections are closed, and never keep others out. Over real sockets."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from worker_node import server
from worker_node.core.errors import Overloaded
from worker_node.http.connection import ConnectionLimits, Connections, admit_connection
from worker_node.http.replies import error_response

NEVER = 3600.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """A server with the connections under test. A request for /hold stays until `go` is set."""

    def __init__(self):
        self.noted = []
        self.go = asyncio.Event()
        self.held = asyncio.Semaphore(0)
        self._open = contextlib.ExitStack()

    async def connect(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._open.callback(writer.close)
        if data:
            writer.write(data)
        return reader, writer

    async def status(self, data=GET):
        reader, _ = await self.connect(data)
        return int((await reader.readuntil(b"\r\n")).split()[1])


@contextlib.asynccontextmanager
async def serving(header=NEVER, keepalive=NEVER, most=1024, spare=64, stall=NEVER, unsent=1 << 30):
    served = Served()

    async def hold(_request):
        served.held.release()
        await served.go.wait()
        return web.Response(text="done")

    async def big(_request):
        return web.Response(body=bytes(50_000_000))

    async def body(request):
        try:
            return web.Response(text=str(len(await request.read())))
        except web.RequestPayloadError:
            return web.Response(status=400)

    async def quick(_request):
        return web.Response(text="hello")

    @web.middleware
    async def admit(request, handler):
        try:
            admit_connection(request)
        except Overloaded as error:
            return error_response(error)
        return await handler(request)

    app = web.Application(middlewares=[admit])
    app.add_routes([web.get("/", quick), web.get("/hold", hold), web.get("/big", big), web.post("/body", body)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    limits = ConnectionLimits(header, keepalive, most, spare, stall, unsent)
    connections = Connections(runner.server, limits, served.noted.append, error_response)
    listener = await asyncio.get_running_loop().create_server(connections.accept, "127.0.0.1", 0)
    served.server = runner.server
    served.port = listener.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        served._open.close()
        listener.close()
        await runner.cleanup()


async def rest(reader):
    """What still comes until the server ends the connection."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-", b"\r\n"])
async def test_a_connection_without_a_header_in_time_is_closed(sent):
    async with serving(header=0.05) as served:
        reader, _ = await served.connect(sent)
        assert await rest(reader) == b""
        assert served.noted == []


async def test_bytes_now_and_then_do_not_extend_the_time_for_a_header():
    async with serving(header=0.2) as served:
        reader, writer = await served.connect(b"GET / HTTP/1.1\r\n")

        async def drip():
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await rest(reader) == b""
        dripping.cancel()


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\n"], ids=["silent", "half a header"])
async def test_between_requests_a_connection_has_the_keepalive_time(begun):
    async with serving(keepalive=0.2) as served:
        reader, writer = await served.connect(GET)
        await reader.readuntil(b"hello")
        writer.write(begun)
        assert await rest(reader) == b""


async def test_idle_connections_keep_nobody_out():
    async with serving(most=8, spare=8) as served:
        silent = [await served.connect(b"GET" if index % 2 else b"") for index in range(40)]
        assert [await served.status() for _ in range(20)] == [200] * 20
        assert await rest(silent[0][0]) == b""
        assert len(served.server.connections) <= 16


async def test_the_connection_that_was_idle_longest_is_replaced_first():
    async with serving(most=2, spare=1) as served:
        first, first_writer = await served.connect(GET)
        await first.readuntil(b"hello")
        second, _ = await served.connect()
        third, third_writer = await served.connect(GET)
        await third.readuntil(b"hello")
        first_writer.write(GET)
        await first.readuntil(b"hello")
        assert await served.status() == 200
        assert await rest(second) == b""
        for reader, writer in ((first, first_writer), (third, third_writer)):
            writer.write(GET)
            await reader.readuntil(b"hello")


async def test_connections_with_a_request_stay_and_the_next_request_gets_429():
    async with serving(most=2, spare=1) as served:
        working = [await served.connect(HOLD) for _ in range(2)]
        for _ in working:
            await served.held.acquire()
        assert await served.status() == 429
        served.go.set()
        for reader, _ in working:
            await reader.readuntil(b"done")
        assert await served.status() == 200


@pytest.mark.parametrize("encoding", [b"br", b"zstd"])
async def test_a_body_in_an_encoding_that_is_not_read_is_refused_by_that_name(encoding):
    async with serving() as served:
        head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Encoding: " + encoding + b"\r\nContent-Length: 4\r\n\r\nabcd"
        reader, _ = await served.connect(head)
        reply = await rest(reader)
        assert reply.split()[1] == b"415"
        assert b"Content-Encoding" in reply.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "sent",
    [b"NONSENSE\r\n\r\n" + GET, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n"],
    ids=["not HTTP", "a header too long"],
)
async def test_malformed_http_gets_a_typed_error_and_the_connection_is_closed(sent):
    async with serving() as served:
        reader, _ = await served.connect(sent)
        reply = await rest(reader)
        assert reply.count(b"HTTP/1.") == 1, "what follows is not read as another request"
        head = reply.partition(b"\r\n\r\n")[0]
        assert head.split()[1] == b"400"
        assert b"\r\nServer: npu-node" in head
        assert b"\r\nX-Request-ID: req_" in head
        assert b"aiohttp" not in head
        assert b"Python" not in head
        assert [error.code for error in served.noted] == ["invalid_request"]


async def test_while_too_much_is_unsent_those_are_dropped_who_let_their_reply_wait_longest():
    async with serving(unsent=120_000_000) as served:
        readers = []
        for _ in range(4):
            reader, _ = await served.connect(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            readers.append(reader)
        for reader in readers[:2]:
            assert len(await rest(reader)) < 50_000_000
        for reader in readers[2:]:
            assert len(await reader.readexactly(50_000_000)) == 50_000_000


@pytest.mark.parametrize(
    ("files", "connections"), [(8, (2, 2)), (64, (16, 16)), (1024, (448, 64)), (2048, (1024, 64)), (9999, (1024, 64))]
)
def test_no_more_connections_are_taken_than_leave_files_for_the_rest_of_the_node(monkeypatch, files, connections):
    monkeypatch.setattr(server, "allow_files", lambda count: min(count, files))
    assert server.connections_allowed(1024) == connections
