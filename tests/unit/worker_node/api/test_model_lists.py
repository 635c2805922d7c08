"""Lists of models are answered from what was read at start: files that are damaged since then break none of them."""

import time
from dataclasses import replace

import pytest
from aiohttp.test_utils import TestClient, TestServer

from worker_node.api.keys import Node, NodeState
from worker_node.app import make_app
from worker_node.devices.npu_source import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.catalog import Catalog
from worker_node.serving.build import Machine, build_model
from worker_node.serving.embedding_cache import EmbeddingCache
from worker_node.serving.registry import Registry
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.telemetry import Telemetry


@pytest.fixture
async def client(store, tmp_path):
    """A node whose model's files are gone, with a damaged model beside it in the store."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "npu-node.json").write_text("{")
    settings = NodeSettings(model_store=tmp_path)
    with npu_source(None, emulated=False) as npu:
        machine = Machine(settings, Probe((DeviceInfo("CPU"),), "test"), npu)
        installed = store.get("all-minilm-l6-v2")
        model = build_model(installed, ModelSettings(name=installed.id), machine)
        model = replace(model, installed=replace(installed, path=tmp_path / "gone"))
        registry = Registry([model], Catalog.load(), Telemetry(), EmbeddingCache(0))
        node = Node(settings, registry, machine.probe, npu, NodeState(time.monotonic()))
        async with TestClient(TestServer(make_app(node))) as client:
            yield client


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/v1/models", "/v1/models/all-minilm-l6-v2", "/health"])
async def test_a_list_of_models_needs_no_file(client, path):
    async with client.get(path) as reply:
        assert reply.status in {200, 503 if path == "/health" else 200}, await reply.text()


async def test_what_is_listed_is_the_sound_model(client):
    async with client.get("/api/tags") as reply:
        [model] = (await reply.json())["models"]
    assert model["name"] == "all-minilm-l6-v2:latest"
    assert len(bytes.fromhex(model["digest"])) == 32
    assert model["modified_at"] > "2020"
    async with client.post("/api/show", json={"model": "all-minilm"}) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/show"), ("POST", "/api/chat"), ("POST", "/api/embed")])
async def test_a_damaged_model_is_not_there(client, method, path):
    async with client.request(
        method, path, json={"model": "broken", "input": "x"} if "embed" in path else {"model": "broken"}
    ) as reply:
        assert reply.status == 404
