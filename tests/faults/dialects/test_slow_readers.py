"""Readers who stop reading: they hold up nobody, what waits for them is bounded, and they miss nothing.

The node runs in this process, so that its sockets can be made small: a kernel would take in a whole answer otherwise.
Its engine echoes the prompt faster than any model writes.
"""

import asyncio
import json
import socket
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest

from tests.faults.engines.test_engine_faults import no_canary, until
from tests.support.scripted_runner import RUNNER
from tests.support.waiting import eventually
from worker_node import server
from worker_node.app import make_app
from worker_node.core.types import Device
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import Engine
from worker_node.http.connection import ConnectionLimits
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer

# Each is a token, and together more than all buffers between a handler and its reader hold: some 130 KiB.
WORDS = " sea" * 2_000
ROUTES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": WORDS}],
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"input": WORDS},
    "/api/chat": {"messages": [{"role": "user", "content": WORDS}]},
}
# What a token may take in memory while it waits: a few objects around an integer.
BYTES_A_TOKEN = 1_000


@pytest.fixture
def stall_timeout_s():
    return 30.0


@pytest.fixture
async def echoing_node(store, monkeypatch, stall_timeout_s):
    """A node whose connections hold a few KiB, and whose model echoes what it is asked."""
    bind = server._bind

    def with_small_buffers(host, port):
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return sock

    installed = store.get("smollm2-135m-instruct")
    spec = EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, RUNNER, {})
    engine = Engine(spec, no_canary, EngineLimits())
    placement = Placement(Device.CPU, engine, Admission("echo", AdmissionLimits(64)), 8192, 8192, eager=True)
    model = GenerationModel(installed, ChatTokenizer(installed.path, installed.context_limit), placements=(placement,))
    monkeypatch.setattr(server, "_bind", with_small_buffers)
    monkeypatch.setattr(server, "ConnectionLimits", partial(ConnectionLimits, stall_timeout_s=stall_timeout_s))
    profile = server.Profile(lambda _machine: [model], make_app)
    async with server.running_node(NodeSettings(port=0), profile) as (node, url):
        await until(engine, EngineState.READY)
        yield SimpleNamespace(url=url, state=node.state, engine=engine)


async def silent_reader(node, route):
    """A connection that has asked for a stream and takes nothing; asyncio's own streams would read ahead."""
    data = json.dumps({"model": "smollm2", "stream": True, **ROUTES[route]}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    host, port = node.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + data)
    return sock


async def read_all(sock):
    """Read the stream after all, to the end of its last chunk; the objects that it was made of."""
    loop = asyncio.get_running_loop()
    taken = b""
    while not taken.endswith(b"\r\n0\r\n\r\n"):
        more = await loop.sock_recv(sock, 65536)
        assert more, taken[-200:]
        taken += more
    lines = (line.removeprefix("data: ") for line in taken.decode().splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def text_of(route, parts):
    if route == "/v1/responses":
        return "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta")
    if route == "/api/chat":
        return "".join(part["message"]["content"] for part in parts)
    return "".join(part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"])


async def test_silent_readers_hold_up_nobody_and_miss_nothing(http, echoing_node):
    tracemalloc.start()
    sockets = []
    try:
        before, _ = tracemalloc.get_traced_memory()
        sockets += await asyncio.gather(*(silent_reader(echoing_node, route) for route in ROUTES))
        await eventually(lambda: echoing_node.state.running == len(ROUTES) and not echoing_node.engine.status.in_flight)
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        for _ in range(3):
            async with http.post(echoing_node.url + "/v1/chat/completions", json=body) as reply:
                assert (await reply.text()).endswith("data: [DONE]\n\n")
        # The engine was done with them long ago, and their handlers still wait for somebody to read.
        assert echoing_node.state.running == len(ROUTES)
        waiting, _ = tracemalloc.get_traced_memory()
        assert waiting - before < len(ROUTES) * 2_000 * BYTES_A_TOKEN
        streams = dict(zip(ROUTES, await asyncio.gather(*map(read_all, sockets)), strict=True))
    finally:
        tracemalloc.stop()
        for sock in sockets:
            sock.close()
    for route, parts in streams.items():
        assert WORDS in text_of(route, parts)
    async with asyncio.timeout(30):
        await echoing_node.state.idle.wait()


@pytest.mark.parametrize("stall_timeout_s", [0.1])
async def test_a_reader_who_takes_nothing_for_long_is_dropped_and_no_failure(echoing_node, caplog):
    sock = await silent_reader(echoing_node, "/v1/chat/completions")
    await eventually(lambda: echoing_node.state.running)
    async with asyncio.timeout(60):
        await echoing_node.state.idle.wait()
    sock.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
