"""A task that a package outside the node brings (tests/toy) is complete: no file of `worker_node` knows of it.

The node finds it by its entry point. Each test is one thing that a task gets from its registration. Its engine is a
real child process that counts vowels.

A node of its own, since the environment decides which tasks it finds: its start is most of this file's seconds.
"""

import json
import os
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nodes import start_node

TOY = Path(__file__).parents[1] / "toy"
# Enough for any answer here on a busy machine; tests that want a deadline set their own.
PATIENCE_S = 60


def write_model(directory):
    directory.mkdir()
    canary = {"text": "banana", "count": 3}
    (directory / "vowels.json").write_text(json.dumps({"vowels": "aeiou", "canary": canary}))
    return directory


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy")
    good = write_model(root / "good")
    config = root / "node.toml"
    config.write_text(
        f"""
        [[models]]
        name = "vowels"
        path = "{good}"
        placements = ["NPU", "CPU"]
        parallel_texts = 2

        [[models]]
        name = "narrow"
        path = "{good}"
        placements = ["CPU"]
        max_outstanding = 1
        """
    )
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOY), os.environ.get("PYTHONPATH")])),
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_COMPILE_CACHE": str(root / "cache"),
        "NPU_NODE_MODEL_STORE": str(root / "store"),
    }
    with start_node("--config", str(config), ready=False, **environment) as running:
        running.wait_for(
            lambda body: {m["id"] for m in body["models"] if m["state"] == "ready"} >= {"vowels", "narrow"}
        )
        yield running


@pytest.fixture
async def count(node, http):
    async def send(*texts, model="vowels", path="/count", **headers):
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        body = {"texts": list(texts), "model": model}
        async with http.post(node.url + path, json=body, headers=headers, timeout=timeout) as reply:
            return reply.status, reply.headers, await reply.json()

    return send


def model_in(body, name):
    return next(model for model in body["models"] if model["id"] == name)


def metric(text, name, **labels):
    """The value of a sample of /metrics; None where there is none."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next((one.value for one in samples if one.name == name and labels.items() <= one.labels.items()), None)


async def test_a_route_answers_from_an_engine_process_and_proves_the_device(count, node):
    status, headers, body = await count("banana", "sky", **{"X-NPU-Require-Device": "NPU"})
    assert (status, body) == (200, {"counts": [3, 0], "device": "NPU"})
    assert headers["X-NPU-Node-Device"] == "NPU"
    assert headers["X-NPU-Emulated"] == "true"
    assert int(headers["X-NPU-Busy-Delta-Us"]) > 0
    assert headers["X-NPU-Node-Token-Count"] == "9"
    assert len(node.engine_processes()) >= 2


async def test_health_and_the_list_of_models_describe_the_task(node, http):
    _, body = node.health()
    found = model_in(body, "vowels")
    assert (found["kind"], found["state"], found["vowels"]) == ("counting", "ready", "aeiou")
    assert found["engines"][0]["canary"]["device"] == "counting NPU"
    async with http.get(node.url + "/models/vowels") as reply:
        described = await reply.json()
    assert (described["task"], described["capabilities"]) == ("count", ["counting"])


async def test_requests_are_validated_and_bounded(count, http, node):
    assert (await count("x" * 65))[2]["error"]["code"] == "context_length_exceeded"
    assert (await count(*["x"] * 9))[0] == 400
    status, _, body = await count("x", model="nothing")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    async with http.post(node.url + "/embeddings", json={"texts": ["x"], "model": "vowels"}) as reply:
        assert reply.status == 400
        assert "is for count, not for embed" in (await reply.json())["error"]["message"]


async def test_metrics_are_the_common_ones_and_the_tasks_own(count, node, http):
    async def read():
        async with http.get(node.url + "/metrics") as reply:
            return await reply.text()

    before = metric(await read(), "npu_node_counted_letters_total", model="narrow", device="CPU") or 0
    assert (await count("banana", model="narrow"))[0] == 200
    text = await read()
    assert metric(text, "npu_node_counted_letters_total", model="narrow", device="CPU") == before + 6
    assert metric(text, "npu_node_routes_total", model="narrow", device="CPU", reason="preferred") >= 1
    assert metric(text, "npu_node_engine_ready", model="vowels", device="NPU") == 1
    assert metric(text, "npu_node_admission_limit", model="narrow", device="CPU") == 1


async def test_the_description_of_the_api_has_the_route(node, http):
    async with http.get(node.url + "/openapi.json") as reply:
        document = await reply.json()
    described, schemas = document["paths"]["/count"]["post"], document["components"]["schemas"]
    assert described["summary"] == "Count vowels"
    assert "X-NPU-Require-Device" in {parameter["name"] for parameter in described["parameters"]}
    taken = described["requestBody"]["content"]["application/json"]["schema"]
    given = described["responses"]["200"]["content"]["application/json"]["schema"]
    assert (taken, given) == ({"$ref": "#/components/schemas/CountBody"}, {"$ref": "#/components/schemas/Counts"})
    assert (list(schemas["CountBody"]["properties"]), schemas["Counts"]["required"]) == (
        ["texts", "model"],
        ["counts", "device"],
    )
