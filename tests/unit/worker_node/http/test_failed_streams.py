"""A reply that fails after its head has gone: it is cut, and nothing is written into it or after it."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.application import application
from worker_node.core.errors import InternalError
from worker_node.http.sse import EventStream, LineStream
from worker_node.settings import NodeSettings


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
        [failure] = node.state.failures.latest_first()
        assert failure.code == "internal_error"


@pytest.mark.parametrize("name", ["/" + "a" * 300, "/" + "a/" * 3000, "/x\0y", "maker/" + "a" * 300])
@pytest.mark.parametrize(("path", "field"), [("/api/pull", "model"), ("/models/pull", "name")])
async def test_a_name_that_no_file_can_have_is_refused_before_anything_begins(path, field, name, tmp_path):
    async with (
        application((), NodeSettings(model_store=tmp_path)) as (client, _),
        client.post(path, json={field: name}) as reply,
    ):
        assert reply.status in {400, 404}, await reply.text()
        assert reply.content_type == "application/json"
