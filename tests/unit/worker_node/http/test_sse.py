"""Streams over real sockets: events, and comments while nothing happens."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from worker_node.http.sse import EventStream


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
