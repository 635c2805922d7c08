"""Lists of models are answered from what was read at start: files that are damaged since then break none of them."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.support.application import application, built_models
from worker_node.models.directory import MANIFEST_FILE
from worker_node.settings import NodeSettings


@pytest.fixture
async def client(store, tmp_path):
    """A node whose model's files are gone; in the store are a damaged model, and one that no task here serves."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "npu-node.json").write_text("{")
    [model] = built_models(store, "all-minilm-l6-v2")
    foreign = tmp_path / "foreign"
    shutil.copytree(model.installed.path, foreign)
    manifest = json.loads((foreign / MANIFEST_FILE).read_bytes()) | {"id": "foreign", "kind": "divination"}
    (foreign / MANIFEST_FILE).write_text(json.dumps(manifest))
    model = replace(model, installed=replace(model.installed, path=tmp_path / "gone"))
    async with application([model], NodeSettings(model_store=tmp_path)) as (client, _):
        yield client


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/v1/models", "/v1/models/all-minilm-l6-v2", "/health"])
async def test_a_list_of_models_needs_no_file(client, path):
    async with client.get(path) as reply:
        assert reply.status in {200, 503 if path == "/health" else 200}, await reply.text()


async def test_what_is_listed_is_the_sound_model(client):
    async with client.get("/api/tags") as reply:
        [model] = (await reply.json())["models"]
    assert model["name"] == "all-minilm-l6-v2:latest"
    assert model["capabilities"] == ["embedding"]
    async with client.get("/v1/models") as reply:
        [listed] = (await reply.json())["data"]
    assert listed["capabilities"] == ["embedding"]
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


async def test_models_that_chat_are_listed_first(store):
    """Open WebUI begins with the first model of the list, and read no capabilities when it was tried."""
    models = built_models(store, "all-minilm-l6-v2", "smollm2-135m-instruct")
    async with application(models, NodeSettings(model_store=store.root)) as (client, _):
        async with client.get("/api/tags") as reply:
            tags = (await reply.json())["models"]
        async with client.get("/v1/models") as reply:
            listed = (await reply.json())["data"]
    for names in ([model["name"].removesuffix(":latest") for model in tags], [model["id"] for model in listed]):
        assert names.index("smollm2-135m-instruct") < names.index("all-minilm-l6-v2")
