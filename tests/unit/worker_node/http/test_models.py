"""The models of a node over HTTP: lists, changes, pulls."""

import asyncio
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.application import application, built_models, with_engine
from tests.support.scripted_engines import Machine, ScriptedEngine
from tests.support.task_models import HEARER, hearer, placement
from worker_node.core.errors import DownloadFailed
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import LoadRequest
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.store import ModelStore
from worker_node.settings import NodeSettings

MODEL = "all-minilm-l6-v2"


@pytest.fixture
async def served(store, tmp_path):
    """An application whose one model is in a store of its own, with a model that is only installed beside it."""
    for name in (MODEL, "beside"):
        shutil.copytree(store.get(MODEL).path, tmp_path / name)
    manifest = tmp_path / "beside" / MANIFEST_FILE
    manifest.write_text(json.dumps(json.loads(manifest.read_bytes()) | {"id": "beside"}))
    [model] = built_models(ModelStore(tmp_path), MODEL)
    engine = ScriptedEngine(MODEL, "CPU", Machine(), load_s=0.01)
    model = with_engine(model, engine)
    model = replace(model, placements=tuple(replace(p, eager=False, estimate=9) for p in model.placements))
    async with application([model], NodeSettings(model_store=tmp_path)) as (client, node):
        node.manager.start()
        yield client, node, model, engine
        await node.manager.stop()


async def get(client, path, status=200, method="GET", **more):
    async with client.request(method, path, **more) as reply:
        body = await reply.json()
        assert reply.status == status, body
        return body


async def test_models_are_listed_loaded_and_unloaded(served):
    client, _, _, engine = served
    listed = {model["id"]: model for model in (await get(client, "/models"))["models"]}
    assert {name: model["state"] for name, model in listed.items()} == {MODEL: "installed", "beside": "installed"}
    assert listed[MODEL]["task"] == "embed"
    assert listed[MODEL]["memory"] == {"bytes": None, "estimate": 9}
    assert listed[MODEL]["details"]["dimensions"] == 384
    usable = {model["id"]: model["loaded"] for model in (await get(client, "/v1/models"))["data"]}
    assert usable == {MODEL: False, "beside": False}
    told = await get(client, "/models/all-minilm/load", 202, "POST")
    assert told["id"] == MODEL
    await engine.settled()
    assert (await get(client, f"/models/{MODEL}"))["state"] == "ready"
    assert (await get(client, "/v1/models"))["data"][0]["loaded"]
    await get(client, f"/models/{MODEL}/unload", 202, "POST")
    assert (await get(client, f"/models/{MODEL}"))["state"] == "unloaded"
    await get(client, "/models/nothing", 404)
    await get(client, "/models/nothing/load", 404, "POST")


async def test_health_and_the_lists_describe_a_placement_alike(store):
    engine = SimpleNamespace(status=EngineStatus(EngineState.UNLOADED, None))
    async with application([hearer(store, [placement(HEARER, engine, request=LoadRequest(0.0))])]) as (client, _):
        [model] = (await get(client, "/health", 503))["models"]
        [placed] = model["engines"]
        assert (placed["state"], placed["reason"]) == ("starting", "it waits for its turn")
        for path in (f"/models/{HEARER}", f"/v1/models/{HEARER}"):
            [listed] = (await get(client, path))["devices"]
            assert placed | listed == placed


async def test_a_load_is_tried_at_once_though_the_last_one_failed(served):
    client, _, _, engine = served
    engine.failures = [True]
    await get(client, f"/models/{MODEL}/load", 202, "POST")
    await engine.settled()
    assert (await get(client, f"/models/{MODEL}"))["state"] == "failed"
    await get(client, f"/models/{MODEL}/load", 202, "POST")
    await engine.settled()
    assert (await get(client, f"/models/{MODEL}"))["state"] == "ready"
    assert engine.loads == 2


async def test_a_model_in_use_is_removed_only_by_force(served, tmp_path):
    client, node, model, engine = served
    await get(client, f"/models/{MODEL}/load", 202, "POST")
    await engine.settled()
    await get(client, f"/models/{MODEL}?force=perhaps", 400, "DELETE")
    with model.activity.working():
        refused = await get(client, f"/models/{MODEL}", 409, "DELETE")
        assert refused["error"]["code"] == "model_in_use"
        assert "force=true" in refused["error"]["message"]
        await get(client, f"/models/{MODEL}?force=true", 200, "DELETE")
    assert not (tmp_path / MODEL).exists()
    assert node.manager.models == ()
    await get(client, f"/models/{MODEL}", 404)


async def test_ollamas_delete_waits_for_the_last_request(served, tmp_path):
    client, _, model, engine = served
    await get(client, f"/models/{MODEL}/load", 202, "POST")
    await engine.settled()
    with model.activity.working():
        deleting = asyncio.create_task(client.delete("/api/delete", json={"model": MODEL}))
        while (await client.get(f"/models/{MODEL}")).status != 404:
            await asyncio.sleep(0.01)
        assert engine.status.pid is not None, "its requests are not cut off"
        assert (tmp_path / MODEL).exists()
    assert (await deleting).status == 200
    assert not (tmp_path / MODEL).exists()


async def test_a_load_that_does_not_fit_is_refused_with_what_is_in_the_way(served):
    client, node, *_ = served
    node.manager.set_budget("host", 1)
    refused = await get(client, f"/models/{MODEL}/load", 503, "POST")
    assert refused["error"]["code"] == "insufficient_memory"
    assert "memory_budget" in refused["error"]["message"]


@pytest.fixture
def pulls(served, monkeypatch):
    """The pulls that begun, which go on when the event is set; that of smollm2 fails."""
    go, begun = asyncio.Event(), []

    async def pull(name, progress):
        begun.append(name)
        progress.stage("downloading", 10)
        await go.wait()
        progress.update(10)
        if name == "smollm2":
            raise DownloadFailed("no network")

    monkeypatch.setattr(served[1].manager, "pull", pull)
    return begun, go


async def test_a_pull_goes_on_without_its_reader_and_is_followed_by_the_same_request(served, pulls):
    client, (begun, go) = served[0], pulls

    async def follow(name):
        async with client.post("/api/pull", json={"model": name}) as reply:
            yield "begun"
            async for line in reply.content:
                yield json.loads(line)

    left = follow("all-minilm")
    assert [await anext(left), await anext(left)] == ["begun", {"status": "pulling manifest"}]
    await left.aclose()
    following = follow("all-minilm")
    assert [await anext(following), await anext(following)] == ["begun", {"status": "pulling manifest"}]
    assert await anext(following) == {"status": "downloading", "total": 10, "completed": 0}
    go.set()
    assert [line async for line in following][-1] == {"status": "success"}
    assert [line async for line in follow("all-minilm")][-1] == {"status": "success"}
    assert begun == ["all-minilm"] * 2, "one that has ended is begun again"
    failed = {"error": "no network", "code": "model_error"}
    assert [line async for line in follow("smollm2")][-1] == failed
    refused = await get(client, "/api/pull", 424, "POST", json={"model": "smollm2", "stream": False})
    assert refused == failed


async def test_a_pull_is_a_job_that_both_dialects_follow(served, pulls, monkeypatch):
    client, (_, go) = served[0], pulls
    monkeypatch.setattr("worker_node.http.models._KEPT", 1)
    job = await get(client, "/models/pull", 202, "POST", json={"name": "all-minilm"})
    failing = await get(client, "/models/pull", 202, "POST", json={"name": "smollm2"})
    assert (job["state"], job["name"], job["error"]) == ("running", "all-minilm", None)
    assert (await get(client, "/models/pull", 202, "POST", json={"name": "all-minilm"}))["id"] == job["id"]
    following = {"Accept": "text/event-stream"}
    async with (
        client.get(f"/models/jobs/{job['id']}", headers=following) as reply,
        client.post("/models/pull", json={"name": "smollm2"}, headers=following) as failed,
        client.post("/api/pull", json={"model": "all-minilm"}) as ollamas,
    ):
        assert reply.content_type == "text/event-stream"
        go.set()
        events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: ")]
        failures = [json.loads(line[6:]) async for line in failed.content if line.startswith(b"data: ")]
        assert json.loads((await ollamas.text()).splitlines()[-1]) == {"status": "success"}
    assert (events[0]["state"], events[-1]["state"]) == ("running", "done")
    assert (events[-1]["completed"], events[-1]["total"]) == (10, 10)
    assert (failures[-1]["id"], failures[-1]["state"]) == (failing["id"], "failed")
    assert failures[-1]["error"]["code"] == "model_error"
    assert await get(client, f"/models/jobs/{failing['id']}") == failures[-1]
    await get(client, "/models/pull", 202, "POST", json={"name": "all-minilm"})
    gone = await get(client, f"/models/jobs/{job['id']}", 404)
    assert gone["error"]["code"] == "job_not_found", "of those that ended the last are kept"


@pytest.mark.parametrize(("path", "field"), [("/api/pull", "model"), ("/models/pull", "name")])
async def test_requests_pull_files_of_the_pull_roots_only_and_learn_of_no_others(tmp_path, monkeypatch, path, field):
    roots, hidden = tmp_path / "roots", tmp_path / "hidden"
    for directory in (roots / "mine", hidden / "secret"):
        directory.mkdir(parents=True)
    (roots / "link").symlink_to(hidden)
    pulled = []

    async def pull(name, _progress):
        pulled.append(name)

    settings = NodeSettings(model_store=tmp_path / "store", pull_roots=[roots])
    async with application([], settings) as (client, node):
        monkeypatch.setattr(node.manager, "pull", pull)
        answers = set()
        outside = (
            hidden / "secret",
            hidden / "none",
            roots / "link/secret",
            roots / "../hidden/secret",
            "/etc/shadow/x",
        )
        for name in map(str, (*outside, "./mine", "../x.gguf", "~/x", "/" + "a" * 300, "/x\0y")):
            async with client.post(path, json={field: name}) as reply:
                answers.add((reply.status, (await reply.text()).partition("requests may")[2]))
        [(status, text)] = answers
        assert status == 400
        assert "absolute path below one of the node's pull_roots" in text
        async with client.post(path, json={field: str(roots / "mine")}) as reply:
            assert reply.status in {200, 202}, await reply.text()
            await reply.read()
        assert pulled == [str(roots / "mine")]
        node.settings = NodeSettings(model_store=tmp_path / "store")
        async with client.post(path, json={field: str(roots / "mine")}) as reply:
            assert reply.status == 400


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
