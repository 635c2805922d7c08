"""Streams over real sockets: events, comments while nothing happens, failures."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.application import application
from worker_node.core.errors import InternalError
from worker_node.http.sse import EventStream, LineStream
from worker_node.settings import NodeSettings


@pytest.fixture
async def serve():
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
            await stream.write(b"data: [DONE]\n\n")
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


@pytest.mark.parametrize("error", [ZeroDivisionError(), InternalError("late")])
@pytest.mark.parametrize("stream", [LineStream, EventStream])
async def test_what_fails_after_the_head_ends_the_connection(stream, error, tmp_path):
    async with application((), NodeSettings(model_store=tmp_path)) as (client, node):

        async def handler(request):
            async with stream(request, {}) as reply:
                await reply.send({"n": 1})
                raise error

        # The node's own middlewares and hooks around a route of the test.
        app = web.Application(middlewares=client.app.middlewares)
        app._state.update(client.app._state)
        app.on_response_prepare.extend(client.app.on_response_prepare)
        app.router.add_get("/health/live", handler)
        server = TestServer(app)
        await server.start_server()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        try:
            request = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            # The second one is sent at once: it must not be answered inside the first reply.
            writer.write(request + request)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                while True:
                    seen = await reader.readuntil(b"\r\n")
                    assert b"HTTP/1.1 500" not in seen  # the id of a request may hold these digits
                    assert seen != b"0\r\n", "a cut reply that ends properly looks complete"
        finally:
            writer.close()
            await server.close()
        [failure] = node.telemetry.failures.latest_first()
        assert failure.code == "internal_error"
