"""The ledger and the spend cap: every part of a request counts, and no reply is believed that cannot be."""

import asyncio
import contextlib
import json
from decimal import Decimal

import pytest
from aiohttp import web

from backend_client import ClientOptions, CloudClient, CloudSettings
from backend_client.errors import CloudRejected, CloudUnavailable, SpendCapReached
from tests.faults.scripted_node import answering, choice, streamed

QUESTION = [{"role": "user", "content": "Where?"}]
LONG = "word " * 1000
FUNCTION = {"name": "f", "description": LONG, "parameters": {"type": "object"}}
PARTS = {
    "functions": [FUNCTION],
    "tools": [{"type": "function", "function": FUNCTION}],
    # A schema may have properties of any name.
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "image_url", "title": LONG}}},
    "prediction": {"type": "content", "content": LONG},
    "metadata": {"note": LONG},
    "user": LONG,
}


def client_of(cloud, cap=None, *, output=0):
    prices = {"chat": {"input": 1, "output": output}, "minilm": {"input": 1}}
    models = {"chat_model": "chat", "embedding_models": {"space-a": "minilm"}}
    return CloudClient(CloudSettings(base_url=cloud.url, api_key="k", **models, prices=prices, spend_cap=cap))


async def bound_of(cloud, body, **price):
    """Millionths of the cap that a request may cost: the cloud does not report what it used."""

    async def respond(request):
        message = {"role": "assistant", "content": "Here."}
        count = (await request.json()).get("n", 1)
        choices = [{"index": index, "message": message, "finish_reason": "stop"} for index in range(count)]
        return web.json_response({"model": "chat", "choices": choices})

    cloud.respond = respond
    async with client_of(cloud, **price) as client:
        await client.post("/v1/chat/completions", body)
        assert client.ledger.cloud.estimated_calls == 1
        return int(client.ledger.cloud.cost * 1_000_000)


@pytest.mark.parametrize("name", PARTS)
async def test_every_part_of_the_body_counts_its_bytes(cloud, name):
    without = await bound_of(cloud, {"messages": QUESTION})
    bound = await bound_of(cloud, {"messages": QUESTION, name: PARTS[name]})
    assert bound - without >= len(json.dumps(PARTS[name])) >= len(LONG)
    body = {"messages": QUESTION, name: PARTS[name]}
    async with client_of(cloud, Decimal(bound - 1) / 1_000_000) as client:
        with pytest.raises(SpendCapReached):
            await client.post("/v1/chat/completions", body)


async def test_what_stands_beside_an_image_counts(cloud):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    plain = await bound_of(cloud, {"messages": [{"role": "user", "content": [image]}]})
    beside = await bound_of(cloud, {"messages": [{"role": "user", "content": [{**image, "text": LONG}]}]})
    assert beside - plain >= len(LONG)
    # The image itself counts as the most that one may cost, not by its bytes.
    assert 50_000 < plain < 60_000


async def test_what_was_predicted_in_vain_counts_as_written_for_each_answer(cloud):
    body = {"messages": QUESTION, "max_tokens": 10, "n": 3}
    without = await bound_of(cloud, body, output=1)
    bound = await bound_of(cloud, {**body, "prediction": {"type": "content", "content": LONG}}, output=1)
    assert bound - without >= (1 + 3) * len(LONG)


USER = {"role": "user", "content": "Where?"}
UNBOUNDED = {
    "service_tier": {"service_tier": "priority"},
    "web_search_options": {"web_search_options": {}},
    "audio": {"audio": {"voice": "alloy", "format": "wav"}},
    "best_of": {"best_of": 9},
    "a_field_of_tomorrow": {"a_field_of_tomorrow": [LONG]},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}, {"type": "web_search"}]},
    "tools  ": {"tools": [{"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}]},
    "content": {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
    "content  ": {"messages": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
    "content    ": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
    "audio of a message": {"messages": [{"role": "assistant", "audio": {"id": "audio-1"}}, USER]},
    "messages": {"messages": "Where?"},
}


@pytest.mark.parametrize("name", UNBOUNDED)
async def test_what_no_bound_is_known_for_is_refused_by_name_under_a_cap(cloud, name):
    body = {"messages": QUESTION, **UNBOUNDED[name]}
    assert await bound_of(cloud, body) > 0
    cloud.requests.clear()
    async with client_of(cloud, Decimal(1)) as client:
        with pytest.raises(CloudRejected, match=f"the spend cap cannot bound what .*{name.strip()}"):
            await client.post("/v1/chat/completions", body)
        assert client.ledger.left == 1
    assert not cloud.requests


async def test_a_whole_conversation_with_tools_and_images_passes_under_a_cap(cloud):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 10, "logprobs": True}
    tools = [{"type": "function", "function": FUNCTION}]
    async with client_of(cloud, Decimal(1)) as client:
        assert (await client.chat(messages, tools=tools, response_format={"type": "text"}, **options)).source == "cloud"
        assert (await client.generate("Where?", top_k=4, max_new_tokens=9)).source == "cloud"


PROMPT = "prompt"
CAP_CALLS = 3
LIES = [(0, 0), (-1_000_000, -5), (1.5, 2), (True, False), ("5", "5"), (None, None)]


def completion(content, usage):
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "chat", "choices": choices, "usage": usage}


def chunks(usage):
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "chat"}
    parts = ([choice({"content": "Paris"}, "stop")], {}), ([], {"usage": usage})
    return streamed(*({**chunk, "choices": choices, **more} for choices, more in parts))


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
@pytest.mark.parametrize("kind", ["whole", "stream", "embedding"])
async def test_a_usage_that_cannot_be_counts_at_the_bound_of_its_call(cloud, lie, kind):
    usage = dict(zip(("prompt_tokens", "completion_tokens"), lie, strict=True))
    row = {"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}
    replies = {
        "whole": lambda: web.json_response(completion("Paris", usage)),
        "stream": lambda: chunks(usage),
        "embedding": lambda: web.json_response({"object": "list", "data": [row], "usage": usage}),
    }

    async def call(client):
        if kind == "stream":
            assert [piece async for piece in client.stream(PROMPT, max_new_tokens=10)] == ["Paris"]
        elif kind == "whole":
            assert (await client.generate(PROMPT, max_new_tokens=10)).text == "Paris"
        else:
            await client.embed(PROMPT)

    cloud.respond = answering(replies[kind])
    async with client_of(cloud, output=1) as free:
        await call(free)
        bound = free.ledger.cloud.cost
    assert bound * 1_000_000 >= len(PROMPT) + (0 if kind == "embedding" else 10)
    cloud.requests.clear()
    async with client_of(cloud, bound * CAP_CALLS, output=1) as client:
        for _ in range(CAP_CALLS):
            await call(client)
        with pytest.raises(SpendCapReached):
            await client.generate(PROMPT, max_new_tokens=10)
        assert client.ledger.cloud.estimated_calls == len(cloud.requests) == CAP_CALLS
        assert client.ledger.cloud.cost == client.ledger.cap


async def test_a_stream_that_its_reader_leaves_counts_at_its_bound(cloud):
    cloud.respond = answering(lambda: streamed({"choices": [choice({"content": "so far"})]}))
    async with client_of(cloud, output=1) as client:
        stream = client.stream_chat(QUESTION, max_tokens=100)
        assert (await anext(stream)).text == "so far"
        await stream.aclose()
        assert client.ledger.cloud.estimated_calls == 1
        assert client.ledger.cloud.completion_tokens == 100


async def test_a_call_that_the_cloud_does_not_answer_in_time_counts_at_its_bound(cloud):
    async def respond(_):
        await asyncio.Event().wait()

    cloud.respond = respond
    async with client_of(cloud, output=1) as client:
        with pytest.raises(CloudUnavailable, match="did not answer within"):
            await client.generate(PROMPT, max_new_tokens=100, timeout=0.3)
        assert client.ledger.cloud.estimated_calls == 1
        assert client.ledger.cloud.completion_tokens == 100


@pytest.mark.parametrize("kind", ["embed", "generate"])
async def test_json_that_is_nested_too_deeply_is_malformed(cloud, kind):
    cloud.respond = answering(lambda: web.Response(text="[" * 100_000, content_type="application/json"))
    async with client_of(cloud) as client:
        with pytest.raises(CloudUnavailable, match="not JSON"):
            await getattr(client, kind)("text")
