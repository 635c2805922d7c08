"""Readers of streams who leave, stop reading or half-close: what they asked for ends, and nobody else notices."""

import asyncio
import json
import socket

import psutil
import pytest

from tests.support.nodes import start_node

pytestmark = pytest.mark.real

MODEL = "smollm2-135m-instruct"
# What the engine says of itself: sequences advanced by a token, summed over all steps.
ROWS = "npu_node_engine_rows_total"
LONG = {"ignore_eos": True, "temperature": 0}
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3000, **LONG},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 3000, **LONG},
    "/api/chat": {"messages": [{"role": "user", "content": "Count."}], "options": {"num_predict": 3000}},
    "/api/generate": {"prompt": "Write a long story.", "options": {"num_predict": 3000, "temperature": 1.0}},
}


async def metric(http, node, name):
    """A metric of the model."""
    async with http.get(node.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and MODEL in line)


async def idle(http, node):
    """Wait until the engine runs nothing."""
    async with asyncio.timeout(60):
        while await metric(http, node, "npu_node_num_requests_running") or await in_flight(http, node):
            await asyncio.sleep(0.1)


async def in_flight(http, node):
    async with http.get(node.url + "/health") as reply:
        return sum(model["in_flight"] for model in (await reply.json())["models"])


def body_of(route):
    return {"model": MODEL, "stream": True, **ROUTES[route]}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_reader_who_leaves_stops_the_generation(http, node, route):
    await idle(http, node)
    before = await metric(http, node, ROWS)
    async with http.post(node.url + route, json=body_of(route)) as reply:
        async for _ in reply.content:
            break
        reply.close()
    # The engine's own count, of one heartbeat with the news that nothing runs: far from the 3,000 asked for.
    async with asyncio.timeout(60):
        while (after := await metric(http, node, ROWS)) == before:
            await asyncio.sleep(0.1)
    await idle(http, node)
    assert await metric(http, node, ROWS) - before < 500
    assert after - before < 500


async def test_200_who_connect_and_drop_leave_nothing(http, node):
    await idle(http, node)
    process = psutil.Process(node.process.pid)
    descriptors = process.num_fds()
    host, port = node.url.removeprefix("http://").split(":")
    data = json.dumps(body_of("/v1/chat/completions")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()

    async def drop(cut):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + data)[:cut])
        await writer.drain()
        writer.transport.abort()

    size = len(head) + len(data)
    await asyncio.gather(*(drop(size if i % 2 else i * size // 200) for i in range(200)))
    await idle(http, node)
    async with asyncio.timeout(30):
        while process.num_fds() > descriptors + 5:
            await asyncio.sleep(0.1)
    async with http.get(node.url + "/health") as reply:
        assert (await reply.json())["status"] == "ready"


async def test_a_reader_who_takes_nothing_holds_up_nobody(http, node):
    host, port = node.url.removeprefix("http://").split(":")
    data = json.dumps(body_of("/v1/chat/completions") | {"max_tokens": 2000}).encode()
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    silent.connect((host, int(port)))
    silent.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": True}
        for _ in range(3):
            async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
                assert (await reply.text()).endswith("data: [DONE]\n\n")
    finally:
        silent.close()
    await idle(http, node)


async def test_a_half_closed_connection_is_answered_or_dropped(http, node):
    host, port = node.url.removeprefix("http://").split(":")
    data = json.dumps(body_of("/v1/completions") | {"max_tokens": 4}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    writer.write_eof()
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    await idle(http, node)


async def test_an_engine_that_dies_ends_the_stream_with_an_error_and_no_done(http):
    with start_node() as node:
        for route, last in (("/v1/chat/completions", "data: "), ("/api/chat", "")):
            node.wait_for(lambda body: body["status"] == "ready", timeout=90)
            async with http.post(node.url + route, json=body_of(route)) as reply:
                await reply.content.readline()
                psutil.Process(node.engine_pids()[MODEL]).kill()
                text = await reply.text()
            *_, error = text.strip().splitlines()
            assert "[DONE]" not in text
            assert '"done":true' not in text
            assert set(json.loads(error.removeprefix(last))) == {"error"}
