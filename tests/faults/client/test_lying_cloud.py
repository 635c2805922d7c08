"""A cloud whose replies parse and lie: neither the ledger nor the spend cap may believe what cannot be."""

import contextlib

import pytest
from aiohttp import web

from backend_client import ClientOptions, CloudClient, CloudSettings
from backend_client.errors import CloudUnavailable, SpendCapReached
from tests.faults.scripted_node import choice, data_event

PROMPT = "prompt"
CAP_CALLS = 3
LIES = {
    "nothing": {"prompt_tokens": 0, "completion_tokens": 0},
    "negative": {"prompt_tokens": -1_000_000, "completion_tokens": -5},
    "fraction": {"prompt_tokens": 1.5, "completion_tokens": 2},
    "bool": {"prompt_tokens": True, "completion_tokens": False},
    "null": {"prompt_tokens": None, "completion_tokens": None},
}


def client_of(cloud, cap=None):
    price = {"input": 1, "output": 1}
    return CloudClient(
        CloudSettings(
            base_url=cloud.url,
            api_key="sk-cloud",
            chat_model="chat",
            embedding_models={"space-a": "minilm"},
            prices={"chat": price, "minilm": price},
            spend_cap=cap,
        )
    )


def completion(content, usage):
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "chat", "choices": choices, "usage": usage}


async def streamed(request, usage):
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "chat"}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(data_event({**chunk, "choices": [choice({"content": "Paris"}, "stop")]}))
    await response.write(data_event({**chunk, "choices": [], "usage": usage}))
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["endless", "compressed"])
async def test_a_reply_without_an_end_is_given_up(cloud, how, stream):
    async def respond(request):
        kind = "text/event-stream" if stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        if how == "compressed":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            while True:
                await response.write(b": nothing\n\n" * 1000)
        return response

    cloud.respond = respond
    options = ClientOptions(max_reply_bytes=100_000)
    settings = CloudSettings(base_url=cloud.url, api_key="sk-cloud", chat_model="chat")
    async with CloudClient(settings, options=options) as client:
        with pytest.raises(
            CloudUnavailable, match="it has more than 100000 bytes" if how == "endless" else "compressed"
        ):
            if stream:
                [_ async for _ in client.stream(PROMPT)]
            else:
                await client.generate(PROMPT)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_usage_that_cannot_be_counts_at_the_bound_of_its_call(cloud, lie, stream):
    async def respond(request):
        usage = LIES[lie]
        return await streamed(request, usage) if stream else web.json_response(completion("Paris", usage))

    async def call(client):
        if stream:
            assert [piece async for piece in client.stream(PROMPT, max_new_tokens=10)] == ["Paris"]
        else:
            assert (await client.generate(PROMPT, max_new_tokens=10)).text == "Paris"

    cloud.respond = respond
    async with client_of(cloud) as free:
        await call(free)
        bound = free.ledger.cloud.cost
    assert bound * 1_000_000 > len(PROMPT) + 10
    cloud.requests.clear()
    async with client_of(cloud, bound * CAP_CALLS) as client:
        for _ in range(CAP_CALLS):
            await call(client)
        with pytest.raises(SpendCapReached):
            await client.generate(PROMPT, max_new_tokens=10)
        assert client.ledger.cloud.estimated_calls == len(cloud.requests) == CAP_CALLS
        assert client.ledger.cloud.cost == client.ledger.cap


@pytest.mark.parametrize("tokens", [0, -5, 1.5, "5", True, None])
async def test_so_does_that_of_an_embedding(cloud, tokens):
    async def respond(_):
        row = {"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}
        return web.json_response({"object": "list", "data": [row], "usage": {"prompt_tokens": tokens}})

    cloud.respond = respond
    async with client_of(cloud) as client:
        await client.embed("text")
        assert client.ledger.cloud.prompt_tokens >= len("text")
        assert client.ledger.cloud.estimated_calls == 1


@pytest.mark.parametrize("kind", ["embed", "generate"])
async def test_json_that_is_nested_too_deeply_is_malformed(cloud, kind):
    async def respond(_):
        return web.Response(text="[" * 100_000, content_type="application/json")

    cloud.respond = respond
    async with client_of(cloud) as client:
        with pytest.raises(CloudUnavailable, match="not JSON"):
            await getattr(client, kind)("text")
