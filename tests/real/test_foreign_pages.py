"""A web page that had its own name made to point at a node (DNS rebinding), and one that only sends, reach nothing."""

import asyncio
import json

import aiohttp
import pytest

from tests.support.nodes import start_node
from tests.support.ports import free_port

pytestmark = pytest.mark.real

ASKED = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/state"),
    ("GET", "/api/tags"),
    ("GET", "/v1/models"),
    ("POST", "/api/pull"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/embeddings"),
    ("DELETE", "/api/delete"),
    ("OPTIONS", "/api/delete"),
    ("GET", "/nowhere"),
]


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """Both ports of a node without models and without keys, with room for few connections."""
    second = free_port()
    environment = {"NPU_NODE_MODELS": "[]", "NPU_NODE_OLLAMA_PORT": str(second), "NPU_NODE_MAX_CONNECTIONS": "50"}
    with start_node(NPU_NODE_MODEL_STORE=str(tmp_path_factory.mktemp("store")), **environment) as node:
        yield int(node.url.rsplit(":", 1)[1]), second


@pytest.mark.parametrize("which", [0, 1], ids=["port", "ollama_port"])
@pytest.mark.parametrize(("method", "path"), ASKED)
async def test_another_name_or_another_sites_page_gets_403(ports, http, which, method, path):
    url = f"http://127.0.0.1:{ports[which]}{path}"
    rebound = {"Host": f"evil.example:{ports[which]}", "Origin": f"http://evil.example:{ports[which]}"}
    for headers in (rebound, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        async with http.request(method, url, json={"model": "all-minilm"}, headers=headers) as reply:
            assert reply.status == 403
            assert "Access-Control-Allow-Origin" not in reply.headers
            assert "error" in json.loads(await reply.text())


@pytest.mark.parametrize("silent", [0, 1], ids=["port", "ollama_port"])
async def test_silent_connections_on_one_port_lock_nobody_out_of_the_other(ports, silent):
    held = [await asyncio.open_connection("127.0.0.1", ports[silent]) for _ in range(120)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        for port in ports:
            for _ in range(10):
                async with http.get(f"http://127.0.0.1:{port}/health") as reply:
                    assert reply.status == 200
    for _, writer in held:
        writer.close()
