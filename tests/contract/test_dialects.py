"""What holds for several dialects alike: refusals in their own form, common headers, names, both ports."""

import asyncio
import json

import pytest

from tests.support.nodes import start_node
from tests.support.ports import free_port

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]
CHATS = ("/v1/chat/completions", "/api/chat")
MODELS = [{"name": "all-minilm-l6-v2"}, {"name": MODEL, "max_outstanding": 1, "aliases": ["gpt-4o-mini", "Acme/Chat"]}]


@pytest.fixture(scope="module")
def ollama_port():
    return free_port()


@pytest.fixture(scope="module")
def narrow_node(quick_models, ollama_port):
    """A node with room for one answer at a time, names of its own for its model, and a second port."""
    with start_node(NPU_NODE_MODELS=json.dumps(MODELS), NPU_NODE_OLLAMA_PORT=str(ollama_port), **quick_models) as node:
        yield node


async def post(http, url, body, headers=None):
    async with http.post(url, json=body, headers=headers) as reply:
        return reply, await reply.json()


def chat(**fields):
    return {"model": MODEL, "messages": MESSAGES, **fields}


def message_of(path, body):
    if path.startswith("/api/"):
        assert set(body) == {"error", "code"}
        return body["error"]
    assert set(body["error"]) == {"message", "type", "code", "param"}
    return body["error"]["message"]


async def test_a_full_node_says_so_as_each_dialect_does(http, narrow_node):
    held = chat(max_tokens=4000, ignore_eos=True, stream=True)
    async with http.post(narrow_node.url + CHATS[0], json=held) as reply:
        await reply.content.readline()
        openai, told = await post(http, narrow_node.url + CHATS[0], chat())
        assert (openai.status, told["error"]["code"]) == (429, "rate_limit_exceeded")
        assert openai.headers["x-should-retry"] == "true"
        ollama, told = await post(http, narrow_node.url + CHATS[1], chat())
        assert ollama.status == 503
        busy = "server busy, please try again. maximum pending requests exceeded"
        assert told == {"error": busy, "code": "overloaded"}
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
        anthropic, told = await post(http, narrow_node.url + "/v1/messages?beta=true", body)
        assert (anthropic.status, told["error"]["type"]) == (429, "rate_limit_error")
        for refused in (openai, ollama, anthropic):
            assert int(refused.headers["Retry-After"]) >= 1
            assert int(refused.headers["retry-after-ms"]) > 0
        reply.close()
    await asyncio.to_thread(narrow_node.wait_for, lambda body: not body["models"][1]["in_flight"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(n=2, max_tokens=1)),
        ("/v1/completions", {"model": MODEL, "prompt": ["One,", "Two,"], "max_tokens": 1}),
    ],
)
async def test_more_answers_than_places_are_rejected_for_good(http, narrow_node, path, body):
    reply, answer = await post(http, narrow_node.url + path, body)
    assert reply.status == 400
    assert "2 answers were asked for at once" in message_of(path, answer)
    assert "has places for 1 (max_outstanding)" in message_of(path, answer)


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"X-NPU-Require-Device": "NPU"}, 503, "NPU"),
        ({"X-Request-Timeout-Ms": "0"}, 504, "time was up"),
        ({"X-Request-Timeout-Ms": "soon"}, 400, "X-Request-Timeout-Ms"),
    ],
)
@pytest.mark.parametrize("path", CHATS)
async def test_the_common_headers_mean_the_same(http, node, path, headers, status, message):
    reply, body = await post(http, node.url + path, chat(), headers)
    assert reply.status == status
    assert message in message_of(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(max_tokens=1)),
        ("/v1/completions", {"model": MODEL, "prompt": "One,", "max_tokens": 1}),
        ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 1}),
        ("/v1/embeddings", {"model": "all-minilm", "input": "Hello"}),
        ("/api/chat", chat(stream=False, options={"num_predict": 1})),
        ("/api/generate", {"model": MODEL, "prompt": "Hello", "stream": False, "options": {"num_predict": 1}}),
        ("/api/embed", {"model": "all-minilm", "input": "Hello"}),
        ("/api/embeddings", {"model": "all-minilm", "prompt": "Hello"}),
    ],
)
async def test_every_reply_names_its_request_and_its_device(http, node, path, body):
    reply, _ = await post(http, node.url + path, body, {"X-Request-ID": "mine-1"})
    assert reply.status == 200
    assert reply.headers["X-Request-ID"] == "mine-1"
    assert (reply.headers["X-NPU-Node-Device"], reply.headers["X-NPU-Node-Route-Reason"]) == ("CPU", "preferred")
    assert int(reply.headers["X-NPU-Node-Token-Count"]) > 0


@pytest.mark.parametrize("name", ["gpt-4o-mini", "acme/chat", "Acme/Chat:latest", "smollm2", MODEL])
async def test_a_model_answers_to_the_names_it_was_given(http, narrow_node, name):
    _, openai = await post(http, narrow_node.url + CHATS[0], chat(model=name, max_tokens=2))
    assert openai["model"] == MODEL
    _, ollama = await post(http, narrow_node.url + CHATS[1], chat(model=name, stream=False, options={"num_predict": 2}))
    assert ollama["message"]["content"] == openai["choices"][0]["message"]["content"]
    async with http.get(f"{narrow_node.url}/v1/models/{name}") as reply:
        assert (await reply.json())["id"] == MODEL


async def test_the_second_port_serves_the_same(http, narrow_node, ollama_port):
    second = f"http://127.0.0.1:{ollama_port}"
    async with http.get(second) as reply:
        assert await reply.text() == "Ollama is running"
    _, body = await post(http, second + CHATS[1], chat(stream=False, options={"num_predict": 2}))
    assert body["done"]
    reply, _ = await post(http, second + CHATS[0], chat(max_tokens=1))
    assert reply.status == 200
