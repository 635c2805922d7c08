"""Streams to readers who are slow, over real sockets: comments while nothing happens, and the end of patience."""

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from worker_node.http.sse import EventStream, LineStream


@pytest.fixture
async def serve():
    """Start an application with one handler at /; what it returns is the server."""
    servers = []

    async def start(handler):
        app = web.Application()
        app.router.add_get("/", handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


async def test_an_idle_stream_is_kept_alive_by_comments_that_are_no_events(http, serve):
    seen = asyncio.Event()

    async def handler(request):
        async with EventStream(request, {"X-Mine": "1"}, keep_alive_s=0.02) as stream:
            await stream.send({"n": 1})
            await seen.wait()
            await stream.send({"n": 2}, "named")
            await stream.send_raw(b"[DONE]")
        return stream.response

    server = await serve(handler)
    async with http.get(server.make_url("/")) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["X-Mine"] == "1"
        lines = []
        async for line in reply.content:
            lines.append(line)
            if line.startswith(b":"):
                seen.set()
    events = [line for line in lines if line.strip() and not line.startswith(b":")]
    assert events == [b'data: {"n":1}\n', b"event: named\n", b'data: {"n":2}\n', b"data: [DONE]\n"]
    assert any(line.startswith(b":") for line in lines)


@pytest.mark.parametrize("kind", [EventStream, LineStream])
async def test_a_reader_who_takes_nothing_for_too_long_is_dropped(serve, kind):
    ended = asyncio.get_running_loop().create_future()

    async def handler(request):
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        try:
            async with kind(request, {}, stall_s=0.05) as stream:
                while True:
                    await stream.send("x" * 10_000)
        except Exception as error:
            ended.set_result(error)
            raise

    server = await serve(handler)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(silent, (server.host, server.port))
        await loop.sock_sendall(silent, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30):
            error = await ended
    assert isinstance(error, ConnectionResetError)
