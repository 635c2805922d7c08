"""A real node announces itself to a real gateway, serves through it, and leaves."""

import json
import signal
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import OpenAI

from backend_client.gateway.keys import KeyStore, Registry
from tests.support.gateway import start_gateway
from tests.support.nodes import start_node
from tests.support.ports import free_port
from worker_node.announce import announced
from worker_node.settings import NodeSettings

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store")]


def test_a_node_joins_serves_and_leaves(tmp_path, quick_models):
    file = tmp_path / "keys.db"
    teams = KeyStore(file)
    registry = Registry(teams.file)
    port = free_port()
    team, enrolment = teams.add("team"), registry.enrol("npu-1", port)
    with start_gateway(NPU_GATEWAY_KEYS=str(file), NPU_GATEWAY_ALLOWED_NETWORKS="127.0.0.0/8") as url:
        announcing = {
            "NPU_NODE_ANNOUNCE": url,
            "NPU_NODE_ANNOUNCE_KEY": enrolment,
            "NPU_NODE_ANNOUNCE_LABELS": json.dumps({"site": "here"}),
            "NPU_NODE_API_KEYS": "only-the-gateway-has-it",
        }
        models = {"NPU_NODE_MODELS": '[{"name": "all-minilm-l6-v2"}]'}
        with (
            start_node("--port", str(port), **models, **announcing, **quick_models) as node,
            OpenAI(base_url=f"{url}/v1", api_key=team, max_retries=5) as client,
        ):
            wait_for(lambda: any(row.live for row in registry.list()))
            (row,) = registry.list()
            assert (row.name, row.url, row.labels) == ("npu-1", node.url, {"site": "here"})
            # The others of the store, too: they are loaded when a request names them.
            wait_for(lambda: "all-minilm-l6-v2" in [model.id for model in client.models.list()])
            found = client.embeddings.create(model="all-minilm-l6-v2", input="through the gateway")
            assert len(found.data[0].embedding) == 384
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(30) == 0
            assert not registry.list()[0].live, "it said that it leaves"
    teams.close()


async def test_the_keys_go_nowhere_that_the_answer_of_a_gateway_leads_to():
    asked = []

    async def answer(request):
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as gateway:
        settings = NodeSettings(announce=(str(gateway.make_url("/")),), announce_key="npunode_a_b")
        async with announced(SimpleNamespace(settings=settings), "http://127.0.0.1:8081"):
            pass
    assert asked == ["/announce"], "at the end it says that it leaves"


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
