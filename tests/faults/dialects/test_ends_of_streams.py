"""Streams that end early for other reasons than their readers: half-closed connections, an engine that dies."""

import asyncio
import json

import psutil
import pytest

from tests.faults.dialects.streams import MODEL, ROUTES, at_rest, body_of, connect, raw_request
from tests.support.nodes import start_node

pytestmark = pytest.mark.real


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_half_closed_connection_is_answered_or_dropped(http, node, route, stream):
    reader, writer = await connect(node)
    writer.write(raw_request(route, stream=stream, tokens=4))
    writer.write_eof()
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    await at_rest(http, node)


def last_event(route, text):
    line = text.strip().splitlines()[-1]
    return json.loads(line if route.startswith("/api/") else line.removeprefix("data: "))


@pytest.mark.usefixtures("store")
async def test_an_engine_that_dies_ends_every_stream_with_an_error_and_no_done(http):
    # A node of its own starts, since its engine is killed; on whole weights, whose answers do not end.
    async def read(node, route, begun):
        async with http.post(node.url + route, json=body_of(route)) as reply:
            first = await reply.content.readline()
            begun.set()
            return first.decode() + await reply.text()

    with start_node(NPU_NODE_MODELS=json.dumps([{"name": MODEL}])) as node:
        begun = {route: asyncio.Event() for route in ROUTES}
        reading = [asyncio.create_task(read(node, route, begun[route])) for route in ROUTES]
        for event in begun.values():
            await event.wait()
        psutil.Process(node.engine_pids()[MODEL]).kill()
        texts = dict(zip(ROUTES, await asyncio.gather(*reading), strict=True))
        for route, text in texts.items():
            last = last_event(route, text)
            if route == "/v1/responses":
                assert last["type"] == "error"
                assert "response.completed" not in text
                continue
            assert set(last) == {"error"}
            assert isinstance(last["error"], str) == route.startswith("/api/")
            assert "[DONE]" not in text
            assert '"done":true' not in text
