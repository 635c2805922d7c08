"""Models in the Ollama dialect: listing, showing, loading and unloading, pulling, and errors in its form."""

import asyncio

import pytest

from tests.support.nodes import start_node

EMBEDDER = "all-minilm"


async def get(http, url):
    async with http.get(url) as reply:
        return reply, await reply.json()


async def post(http, url, **body):
    async with http.post(url, json=body) as reply:
        return reply, await reply.json()


@pytest.fixture(scope="module")
def own_node(store):
    with start_node(NPU_NODE_MODELS='[{"name": "all-minilm-l6-v2"}]') as running:
        yield running


async def test_the_root_and_head_requests_answer_as_ollamas_do(http, node):
    async with http.get(node.url + "/") as reply:
        assert await reply.text() == "Ollama is running"
    for path in ("/", "/api/tags", "/api/version"):
        async with http.head(node.url + path) as reply:
            assert reply.status == 200


async def test_tags_lists_models_and_show_describes_one(http, node):
    _, tags = await get(http, node.url + "/api/tags")
    names = {model["name"] for model in tags["models"]}
    assert {"smollm2-135m-instruct:latest", "all-minilm-l6-v2:latest"} <= names
    for model in tags["models"]:
        assert model["size"] > 1_000_000
        assert len(bytes.fromhex(model["digest"])) == 32
    _, shown = await post(http, node.url + "/api/show", model="smollm2:135m")
    assert shown["capabilities"] == ["completion", "tools"]
    assert "im_start" in shown["template"]
    assert shown["model_info"]["smollm.context_length"] == 8192
    _, shown = await post(http, node.url + "/api/show", name="all-minilm:latest")
    assert shown["capabilities"] == ["embedding"]


async def test_embed_equals_the_native_route(http, node):
    texts = ["one text", "another"]
    _, body = await post(http, node.url + "/api/embed", model=EMBEDDER, input=texts)
    _, native = await post(http, node.url + "/embeddings", texts=texts)
    assert body["prompt_eval_count"] == native["usage"]["prompt_tokens"]
    for ours, theirs in zip(body["embeddings"], native["embeddings"], strict=True):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 2e-3
    _, one = await post(http, node.url + "/api/embeddings", model=EMBEDDER, prompt="one text")
    assert len(one["embedding"]) == 384


async def test_long_texts_are_cut_unless_forbidden(http, node):
    long = "word " * 1000
    reply, body = await post(http, node.url + "/api/embed", model=EMBEDDER, input=long)
    assert (reply.status, body["prompt_eval_count"]) == (200, 256)
    reply, _ = await post(http, node.url + "/api/embed", model=EMBEDDER, input=long, truncate=False)
    assert reply.status == 400


async def test_a_model_is_unloaded_and_loaded_again(http, own_node):
    await post(http, own_node.url + "/api/generate", model=EMBEDDER, keep_alive=-1, stream=False)
    pids = own_node.engine_pids()
    _, unloaded = await post(http, own_node.url + "/api/generate", model=EMBEDDER, keep_alive=0, stream=False)
    assert unloaded["done_reason"] == "unload"
    _, running = await get(http, own_node.url + "/api/ps")
    assert EMBEDDER not in " ".join(model["name"] for model in running["models"])
    _, body = await post(http, own_node.url + "/api/embed", model=EMBEDDER, input="x", keep_alive="10m")
    assert body["load_duration"] > 0
    _, running = await get(http, own_node.url + "/api/ps")
    (model,) = [model for model in running["models"] if model["name"].startswith(EMBEDDER)]
    assert not model["expires_at"].startswith("2318")
    assert own_node.engine_pids()["all-minilm-l6-v2"] != pids["all-minilm-l6-v2"]
    _, loaded = await post(http, own_node.url + "/api/generate", model=EMBEDDER, keep_alive=-1, stream=False)
    assert loaded["done_reason"] == "load"
    _, running = await get(http, own_node.url + "/api/ps")
    assert all(model["expires_at"].startswith("2318") for model in running["models"])


@pytest.mark.parametrize("route", ["generate", "chat"])
async def test_unloading_an_unloaded_model_does_not_load_it(http, own_node, route):
    for _ in range(2):
        _, unloaded = await post(http, f"{own_node.url}/api/{route}", model=EMBEDDER, keep_alive=0, stream=False)
        assert unloaded["done_reason"] == "unload"
        # The engine's process ends after the reply.
        await asyncio.to_thread(own_node.wait_for, lambda body: body["models"][0]["state"] == "unloaded")
    assert own_node.engine_pids()["all-minilm-l6-v2"] is None


async def test_errors_have_ollamas_form_below_api_only(http, node):
    async with http.get(node.url + "/api/nothing") as reply:
        assert reply.status == 404
        assert isinstance((await reply.json())["error"], str)
    async with http.put(node.url + "/api/chat") as reply:
        assert reply.status == 405
        assert reply.headers["Allow"] == "POST"
        assert isinstance((await reply.json())["error"], str)
    async with http.get(node.url + "/v1/nothing") as reply:
        assert set((await reply.json())["error"]) == {"message", "type", "code", "param"}
    async with http.delete(node.url + "/api/delete", json={"model": "no-such-model"}) as reply:
        assert reply.status == 404
        assert (await reply.json())["error"] == "model 'no-such-model' not found"
    async with http.post(node.url + "/api/chat", data=b"{") as reply:
        assert reply.status == 400
        assert isinstance((await reply.json())["error"], str)
