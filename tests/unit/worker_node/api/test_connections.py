"""Connections that do nothing end, and never keep others out. Over real sockets."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from worker_node.http.connection import ConnectionLimits, GuardedConnection
from worker_node.http.errors import error_response

NEVER = 3600.0
HEAD = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


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

    async def ask(self, data=GET):
        reader, _ = await self.connect(data)
        return int((await reader.readuntil(b"\r\n")).split()[1])


@contextlib.asynccontextmanager
async def serving(header=NEVER, keepalive=NEVER, most=1024, stall=NEVER, grace=NEVER, linger=NEVER):
    served = Served()

    async def hold(_request):
        served.held.release()
        await served.go.wait()
        return web.Response(text="done")

    async def big(_request):
        return web.Response(body=bytes(50_000_000))

    async def body(request):
        served.held.release()
        try:
            return web.Response(text=str(len(await request.read())))
        except web.RequestPayloadError:
            return web.Response(status=400)

    async def quick(_request):
        return web.Response(text="hello")

    app = web.Application()
    app.add_routes([web.get("/", quick), web.get("/hold", hold), web.get("/big", big), web.post("/body", body)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    loop = asyncio.get_running_loop()
    limits = ConnectionLimits(header, keepalive, most, stall, grace, linger)
    listener = await loop.create_server(
        lambda: GuardedConnection(runner.server, loop, limits, served.noted.append, error_response), "127.0.0.1", 0
    )
    served.server = runner.server
    served.port = listener.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        served._open.close()
        listener.close()
        await runner.cleanup()


async def ends(reader):
    """What still comes until the server ends the connection."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b"reset"


async def test_a_silent_connection_ends_without_a_word():
    async with serving(header=0.05) as served:
        reader, _ = await served.connect()
        assert await ends(reader) == b""
        assert served.noted == []


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-", b"\r\n"])
async def test_a_header_that_does_not_end_is_a_408(sent):
    async with serving(header=0.5) as served:
        reader, _ = await served.connect(sent)
        assert (await ends(reader)).startswith(b"HTTP/1.1 408 ")
        assert [error.code for error in served.noted] == ["request_timeout"]


async def test_bytes_now_and_then_do_not_extend_the_time_for_a_header():
    async with serving(header=0.2) as served:
        reader, writer = await served.connect(b"GET / HTTP/1.1\r\n")

        async def drip():
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert (await ends(reader)).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        assert [error.code for error in served.noted] == ["request_timeout"]


async def test_an_idle_connection_ends_after_the_keepalive_time_and_a_second_header_has_its_own():
    async with serving(header=NEVER, keepalive=0.1) as served:
        reader, _ = await served.connect(GET)
        assert (await ends(reader)).startswith(b"HTTP/1.1 200 ")
    async with serving(header=0.5) as served:
        reader, writer = await served.connect(GET)
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET")
        assert (await ends(reader)).startswith(b"HTTP/1.1 408 ")


async def test_a_request_that_takes_longer_than_the_header_may_is_not_cut():
    async with serving(header=0.5) as served:
        reader, _ = await served.connect(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
        await served.held.acquire()
        silent, _ = await served.connect()
        await ends(silent)  # the time for a header is over
        served.go.set()
        assert b"done" in await reader.readuntil(b"done")


async def test_silent_connections_lock_nobody_out():
    async with serving(most=16) as served:
        silent = [await served.connect(b"GET" if index % 2 else b"") for index in range(40)]
        assert [await served.ask() for _ in range(20)] == [200] * 20
        assert await ends(silent[0][0]) in {b"", b"reset"}


async def test_silent_connections_go_before_idle_ones_and_the_oldest_first():
    async with serving(most=3) as served:
        idle, idle_writer = await served.connect(GET)
        await idle.readuntil(b"hello")
        first, _ = await served.connect()
        second, second_writer = await served.connect()
        assert await served.ask() == 200
        assert await ends(first) in {b"", b"reset"}
        for reader, writer in ((idle, idle_writer), (second, second_writer)):
            writer.write(GET)
            await reader.readuntil(b"hello")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n",
    ],
)
async def test_a_connection_that_asks_for_another_protocol_ends_with_its_reply(head):
    async with serving() as served:
        reader, _ = await served.connect(head)
        assert (await ends(reader)).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 "))


async def test_a_body_that_is_not_what_its_headers_say_is_no_traceback_in_the_log(caplog):
    async with serving() as served:
        head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: 15\r\n\r\n"
        reader, _ = await served.connect(head + b'{"texts":["a"]}')
        await ends(reader)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_connections_at_work_are_never_replaced():
    async with serving(most=2) as served:
        working = [await served.connect(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        for _ in working:
            await served.held.acquire()
        reader, _ = await served.connect()
        assert (await ends(reader)).startswith(b"HTTP/1.1 429 ")
        served.go.set()
        for reader, _ in working:
            await reader.readuntil(b"done")


async def test_slow_senders_give_way_once_they_had_their_time():
    async with serving(most=2, grace=60) as served:
        slow = [await served.connect(HEAD + b"ab") for _ in range(2)]
        for _ in slow:
            await served.held.acquire()
        assert await served.ask() == 429, "they have only begun"
        for connection in served.server.connections:
            connection._since -= 60  # their time is over
        assert await served.ask() == 200
        slow[1][1].write(b"cd")
        assert b"4" in await slow[1][0].readuntil(b"4")


async def test_a_reader_that_takes_nothing_is_dropped_and_a_slow_one_is_not():
    async with serving(stall=4.0) as served:
        head = b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n"
        stuck, _ = await served.connect(head)
        slow, _ = await served.connect(head)
        await slow.readuntil(b"\r\n\r\n")
        taken = 0
        while taken < 50_000_000:
            piece = await slow.read(2_000_000)
            assert piece, f"it was dropped after {taken} bytes"
            taken += len(piece)
            await asyncio.sleep(0.01)
        assert taken == 50_000_000
        async with asyncio.timeout(60):
            while len(served.server.connections) > 1:
                await asyncio.sleep(0.01)
        rest = 0
        with contextlib.suppress(ConnectionResetError):
            while data := await stuck.read(1 << 20):
                rest += len(data)
        assert rest < 50_000_000


@pytest.mark.parametrize("encoding", [b"br", b"zstd"])
async def test_a_body_in_an_encoding_that_is_not_read_is_refused_by_that_name(encoding):
    async with serving() as served:
        head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Encoding: " + encoding + b"\r\nContent-Length: 4\r\n\r\nabcd"
        reader, _ = await served.connect(head)
        reply = await ends(reader)
        assert reply.split()[1] == b"400"
        assert b"Content-Encoding" in reply.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-", b"408"),
    ],
    ids=["no request", "a header too long", "a header that does not end"],
)
async def test_replies_without_a_request_have_an_id_and_tell_no_versions(sent, status):
    async with serving(header=0.2) as served:
        reader, _ = await served.connect(sent)
        reply = await ends(reader)
        head = reply.partition(b"\r\n\r\n")[0]
        assert head.split()[1] == status
        assert b"\r\nServer: npu-node" in head
        assert b"\r\nX-Request-ID: req_" in head
        assert b"aiohttp" not in head
        assert b"Python" not in head


MALFORMED = b"not HTTP\r\n\r\n"


async def sends_on(writer, piece=b"X-A: b\r\n"):
    """A client who never looks at what comes back."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("sent", "status"), [(MALFORMED, b"400"), (b"GET / HTTP/1.1\r\nX-", b"408")])
async def test_the_last_reply_arrives_at_a_client_who_goes_on_sending(sent, status):
    """A close with bytes unread resets the connection, and the client never sees the reply."""
    # Too short for more headers than are taken.
    async with serving(header=0.05) as served:
        reader, writer = await served.connect(sent)
        sending = asyncio.create_task(sends_on(writer))
        # Long after the reply, as a client that first sends all it has.
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            assert (await reader.readline()).split()[1] == status
        assert not sending.done(), "nobody closed on it"
        sending.cancel()


@pytest.mark.parametrize("limit", ["time", "bytes", "close"])
async def test_what_comes_after_the_last_reply_is_read_for_a_while_only(limit):
    async with serving(linger=0.05 if limit == "time" else NEVER) as served:
        reader, writer = await served.connect(MALFORMED)
        await reader.readuntil(b"\r\n")
        if limit == "close":
            writer.close()
        elif limit == "bytes":
            writer.write(bytes(3 << 20))
        async with asyncio.timeout(20):
            while served.server.connections:
                await asyncio.sleep(0.01)


async def test_connections_that_only_linger_take_no_place_and_are_limited():
    async with serving(most=2) as served:
        lingering = [await served.connect(MALFORMED) for _ in range(100)]
        for reader, _ in lingering:
            assert b" 400 " in await reader.readline()
        assert len(served.server.connections) <= 64 + 1
        assert [await served.ask() for _ in range(3)] == [200] * 3
