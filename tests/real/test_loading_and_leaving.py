"""Requests for models that are being loaded or removed: they wait, or end at once with what happens to the model."""

import asyncio
import json
import os
import shutil
import signal

import aiohttp
import pytest

from tests.real.inference import post
from tests.support.nodes import start_node

pytestmark = pytest.mark.real

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]
# A request of each dialect, streams among them.
REQUESTS = [
    ("/embeddings", {"texts": ["a"]}),
    ("/v1/embeddings", {"model": EMBEDDER, "input": "a"}),
    ("/api/embed", {"model": EMBEDDER, "input": "a"}),
    ("/inference", {"prompt": "Hello", "max_new_tokens": 2}),
    ("/inference", {"prompt": "Hello", "max_new_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"model": WRITER, "messages": MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"model": WRITER, "prompt": "Hello", "max_tokens": 2}),
    ("/v1/responses", {"model": WRITER, "input": "Hello", "max_output_tokens": 16}),
    ("/api/chat", {"model": WRITER, "messages": MESSAGES, "options": {"num_predict": 2}}),
    ("/api/generate", {"model": WRITER, "prompt": "Hello", "options": {"num_predict": 2}, "stream": False}),
]


def with_session(test):
    async def run(node):
        async with aiohttp.ClientSession() as http:
            await test(http, node)

    return lambda node: asyncio.run(run(node))


@pytest.mark.parametrize("after", ["start", "crash"])
def test_requests_of_any_dialect_wait_for_a_model_that_is_loading_and_no_more_than_there_are_places(
    quick_models, after
):
    # More than 5 s: both models load.
    @with_session
    async def ask(http, node):
        if after == "crash":
            for pid in node.engine_processes():
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(
                node.wait_for, lambda body: all(model["state"] != "ready" for model in body["models"])
            )
        states = {model["id"]: model for model in node.health()[1]["models"]}
        assert states[WRITER]["state"] == "loading"
        assert states[WRITER]["ready_in_s"] > 0
        for headers in ({"X-Request-Timeout-Ms": "100"}, {"X-NPU-Restart-Wait-Ms": "0"}):
            status, replied, content = await post(http, node, "/inference", {"prompt": "Hello"}, headers)
            assert status == 503, content
            assert json.loads(content)["error"]["code"] in {"model_loading", "engine_unavailable"}
            assert int(replied["Retry-After"]) > 0
        answers = await asyncio.gather(*(post(http, node, path, body) for path, body in REQUESTS))
        for (path, body), (status, _, content) in zip(REQUESTS, answers, strict=True):
            assert status == 200, (path, body, content)
            assert b"error" not in content.replace(b'"error":null', b"")

    @with_session
    async def fill(http, node):
        small = {"prompt": "Hello", "max_new_tokens": 1}
        answers = await asyncio.gather(*(post(http, node, "/inference", small) for _ in range(5)))
        assert sorted(status for status, *_ in answers) == [200, 200, 200, 429, 429]
        assert node.health()[1]["models"][0]["in_flight"] == 0

    if after == "start":
        only = json.dumps([{"name": WRITER, "max_outstanding": 3}])
        with start_node(ready=False, NPU_NODE_MODELS=only, **quick_models) as node:
            fill(node)
    with start_node(ready=after == "crash", **quick_models) as node:
        ask(node)


def test_a_node_that_ends_refuses_what_still_waits_for_a_load(quick_models):
    @with_session
    async def end(http, node):
        await asyncio.to_thread(node.wait_for, lambda body: node.engine_processes())
        for pid in node.engine_processes():
            os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(post(http, node, "/inference", {"prompt": "Hello"}))
        await asyncio.to_thread(node.wait_for, lambda body: body["models"][0]["in_flight"] == 1)
        node.process.send_signal(signal.SIGTERM)
        status, _, content = await waiting
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert "the node is shutting down" in error["message"]

    models = {"NPU_NODE_MODELS": json.dumps([{"name": WRITER}]), "NPU_NODE_DRAIN_TIMEOUT_S": "0.2"}
    with start_node(ready=False, **models, **quick_models) as node:
        end(node)


def test_a_forced_removal_ends_streams_with_its_reason_and_leaves_the_model_failed(tmp_path, quick_models):
    # More than 5 s: a model loads.
    @with_session
    async def remove(http, node):
        endless = {"prompt": "Hello", "max_new_tokens": 1000, "ignore_eos": True, "stream": True}
        async with http.post(node.url + "/inference", json=endless) as reply:
            assert (await reply.content.readline()).startswith(b"event: token")
            async with http.delete(f"{node.url}/models/{WRITER}") as refused:
                assert refused.status == 409
            async with http.delete(f"{node.url}/models/{WRITER}?force=true") as deleted:
                assert deleted.status == 200
            last = (await reply.content.read()).decode().strip().splitlines()[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
        assert error["message"].endswith("the model was removed")
        _, health = node.health()
        [model] = health["models"]
        assert (model["id"], model["kind"], model["state"]) == (WRITER, "generation", "failed")
        assert f"npu-node pull {WRITER}" in model["reason"]
        async with http.get(f"{node.url}/models/smollm2") as reply:
            listed = await reply.json()
        assert (listed["id"], listed["task"], listed["state"]) == (WRITER, "generate", "failed")
        for body in ({"prompt": "Hello"}, {"prompt": "Hello", "model": "smollm2"}):
            status, _, content = await post(http, node, "/inference", body)
            assert (status, json.loads(content)["error"]["code"]) == (503, "engine_unavailable"), content

    store = tmp_path / "models"
    shutil.copytree(quick_models["NPU_NODE_MODEL_STORE"], store)
    models = json.dumps([{"name": WRITER}])
    with start_node(NPU_NODE_MODELS=models, NPU_NODE_MODEL_STORE=str(store)) as node:
        remove(node)
