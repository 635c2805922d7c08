"""The one line in the log: what the node and the sidecar write of a request, and what they do not."""

import asyncio
import logging
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from worker_node.http.middleware import before_each_head, hide_versions, log_requests, tell_request_id
from worker_node.http.request_state import NODE
from worker_node.http.sse import EventStream

SECRET = "zanzibar-7f3a9c"


async def answer(request):
    return web.Response(text="fine")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "worker_node.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "worker_node.access"]


async def serving(middleware, *routes):
    app = web.Application(middlewares=[middleware])
    app[NODE] = SimpleNamespace(telemetry=MagicMock())
    app.on_response_prepare.append(before_each_head(hide_versions, tell_request_id))
    app.add_routes([web.get("/things/{name}", answer), *routes])
    return TestClient(TestServer(app))


async def test_method_route_status_time_and_the_id(lines):
    async with await serving(log_requests()) as client:
        reply = await client.get(f"/things/{SECRET}?q={SECRET}", headers={"X-Request-ID": "req_7"})
        assert (reply.headers["X-Request-ID"], reply.headers["Server"]) == ("req_7", "npu-node")
    [line] = lines()
    assert re.fullmatch(r"GET /things/\{name\} 200 \d+\.\d ms req_7", line)


@pytest.mark.parametrize(("complete", "status"), [(True, 200), (False, "cancelled")])
async def test_a_stream_whose_last_frame_was_written_is_complete_whenever_its_reader_leaves(lines, complete, status):
    ended = asyncio.get_running_loop().create_future()

    async def stream(request):
        async with EventStream(request, {}) as reply:
            await reply.send_raw(b"[DONE]")
            if not complete:
                await ended
        await ended  # as the release of an engine may take until the reader has left

    async with await serving(log_requests(), web.get("/stream", stream)) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"data: [DONE]\n\n")
        writer.transport.abort()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            while not lines():
                await asyncio.sleep(0)
        client.app[NODE].telemetry.responded.assert_called_once_with("/stream", status)
    [line] = lines()
    assert line.startswith(f"GET /stream {status} ")


async def test_nothing_that_the_caller_made_up_is_in_the_line(lines):
    async with await serving(log_requests(lambda _request: "-")) as client:
        await client.request("PROPFIND", f"/{SECRET}", headers={"X-Request-ID": SECRET})
    [line] = lines()
    assert re.fullmatch(r"- - \w+ \d+\.\d ms -", line)
