"""The one line in the log: what the node and the sidecar write of a request, and what they do not."""

import logging
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from worker_node.api.keys import NODE
from worker_node.api.middleware import before_each_head, hide_versions, log_requests, tell_request_id

SECRET = "zanzibar-7f3a9c"


async def answer(request):
    return web.Response(text="fine")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "worker_node.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "worker_node.access"]


async def serving(middleware):
    app = web.Application(middlewares=[middleware])
    app[NODE] = SimpleNamespace(telemetry=MagicMock())
    app.on_response_prepare.append(before_each_head(hide_versions, tell_request_id))
    app.add_routes([web.get("/things/{name}", answer)])
    return TestClient(TestServer(app))


async def test_method_route_status_time_and_the_id(lines):
    async with await serving(log_requests()) as client:
        reply = await client.get(f"/things/{SECRET}?q={SECRET}", headers={"X-Request-ID": "req_7"})
        assert (reply.headers["X-Request-ID"], reply.headers["Server"]) == ("req_7", "npu-node")
    [line] = lines()
    assert re.fullmatch(r"GET /things/\{name\} 200 \d+\.\d ms req_7", line)


async def test_nothing_that_the_caller_made_up_is_in_the_line(lines):
    async with await serving(log_requests(lambda _request: "-")) as client:
        await client.request("PROPFIND", f"/{SECRET}", headers={"X-Request-ID": SECRET})
    [line] = lines()
    assert re.fullmatch(r"- - \w+ \d+\.\d ms -", line)
