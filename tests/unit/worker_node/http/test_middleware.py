"""What every request passes: the log, errors, keys that change."""

import asyncio
import json
import logging
import re
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from backend_client.http.errors import event_error, status_error
from backend_client.http.messages import Reply
from tests.support.application import application
from worker_node.core.errors import ContextLengthExceeded, EngineCrashed, EngineDied, EngineUnavailable, ModelNotFound
from worker_node.http.context import NODE
from worker_node.http.middleware import begin_reply, describe_request, log_requests
from worker_node.http.replies import renderer, retry_headers
from worker_node.http.routes import DESCRIBED
from worker_node.http.sse import EventStream
from worker_node.observability.metrics import RecentFailures
from worker_node.settings import NodeSettings

SECRET = "zanzibar-7f3a9c"


async def answer(request):
    return web.Response(text="fine")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "worker_node.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "worker_node.access"]


async def serving(middleware, *routes):
    app = web.Application(middlewares=[middleware])
    app[NODE] = MagicMock()
    app.on_response_prepare.extend((begin_reply, describe_request))
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
            await reply.write(b"data: [DONE]\n\n")
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
        counted = client.app[NODE].services.telemetry.http_requests.labels
        counted.assert_called_once_with("/stream", str(status))
    [line] = lines()
    assert line.startswith(f"GET /stream {status} ")


async def test_nothing_that_the_caller_made_up_is_in_the_line(lines):
    async with await serving(log_requests(lambda _request: "-")) as client:
        await client.request("PROPFIND", f"/{SECRET}", headers={"X-Request-ID": SECRET})
    [line] = lines()
    assert re.fullmatch(r"- - \w+ \d+\.\d ms -", line)


def died(model="m", device="NPU"):
    error = EngineUnavailable("the text of the error is not kept")
    error.model, error.device = model, device
    return error


def test_a_caller_who_repeats_a_mistake_hides_no_other_failure():
    failures = RecentFailures()
    failures.add(died(), "/inference")
    for _ in range(1000):
        failures.add(ModelNotFound("no such model"), "/v1/embeddings")
    failures.add(died(), "/inference")
    assert [(entry.code, entry.count) for entry in failures.latest_first()] == [
        ("engine_unavailable", 2),
        ("model_not_found", 1000),
    ]
    for number in range(1000):
        failures.add(died(), f"/{number}")
    assert [entry.route for entry in failures.latest_first()] == [f"/{number}" for number in range(999, 949, -1)]


async def test_keys_host_names_pages_and_limits_are_those_of_the_new_settings():
    async with application() as (client, node):

        async def status(**headers):
            async with client.get("/models", headers=headers) as reply:
                return reply.status, reply.headers.get("Access-Control-Allow-Origin")

        page = {"Origin": "https://app.example"}
        assert await status(Host="npu.example") == (403, None)
        assert await status(**page) == (403, None)
        changed = NodeSettings(allowed_hosts=("npu.example",), cors_origins=("https://app.example",), max_body_bytes=10)
        node.adopt(changed)
        assert await status(Host="npu.example") == (200, None)
        assert await status(**page) == (200, "https://app.example")
        async with client.post("/inference", json={"prompt": "more than ten bytes"}) as reply:
            assert reply.status == 413
        for key, other in (("one-0123456789abcdef", "two-0123456789abcdef"), ("two-0123456789abcdef", "")):
            node.adopt(NodeSettings(api_keys=(key,)))
            assert (await status(Authorization=f"Bearer {key}"))[0] == 200
            assert (await status(Authorization=f"Bearer {other}"))[0] == 401


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "send one of"),
        ({"Authorization": "Bearer no"}, "that was sent is wrong"),
        ({"x-api-key": "no"}, "is wrong"),
    ],
)
async def test_a_wrong_key_and_a_missing_one_are_told_apart(headers, said):
    async with application() as (client, node):
        node.adopt(NodeSettings(api_keys=("one-0123456789abcdef",)))
        async with client.get("/models", headers=headers) as reply:
            message = (await reply.json())["error"]["message"]
    assert (reply.status, said in message, "wrong" in message) == (401, True, bool(headers))


async def test_a_node_that_drains_refuses_inference_on_every_route():
    async with application() as (client, node):
        node.state.draining = True
        for operation in client.app[DESCRIBED]:
            if operation.inference:
                status = 529 if operation.path.startswith("/v1/messages") else 503
                async with client.post(operation.path, json={}) as reply:
                    assert (reply.status, "shutting down" in await reply.text()) == (status, True), operation.path
        async with client.get("/v1/models") as reply:
            assert reply.status == 200


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/inference", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/v1/messages", "anthropic"),
        ("/api/chat", "ollama"),
    ],
)
def test_an_error_says_its_code_in_every_dialect_and_the_client_reads_it(path, dialect):
    for error in (EngineCrashed("m on NPU"), EngineDied("m on NPU"), ContextLengthExceeded("9 tokens")):
        said = renderer(make_mocked_request("POST", path))(error)
        whole = status_error("http://a", Reply(said.status, {}, said.body), None, dialect)
        # A stream of Ollama's, and of Anthropic's, ends with the same body.
        streamed = event_error("http://a", json.loads(said.body), None)
        assert [found.code for found in (whole, streamed)] == [error.code] * 2


@pytest.mark.parametrize(("wait_s", "told"), [(0.0001, ("1", "1")), (1.2, ("2", "1200")), (3.0, ("3", "3000"))])
def test_no_caller_is_told_to_come_again_too_early(wait_s, told):
    headers = retry_headers(EngineUnavailable("busy", retry_after=wait_s))
    assert (headers["Retry-After"], headers["retry-after-ms"]) == told
