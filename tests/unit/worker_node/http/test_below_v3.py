"""Everything of OpenAI's dialect is answered below /v3 too, where OpenVINO Model Server has it."""

import json

import pytest

from tests.support.writing import EMBEDDER, WRITER, writing

TURNS = [{"role": "user", "content": "Hello"}]
VARYING = {"id", "created", "created_at", "completed_at", "timing_ms"}


def steady(body):
    """A reply without what differs between two requests."""
    if isinstance(body, dict):
        return {key: steady(value) for key, value in body.items() if key not in VARYING}
    return [steady(item) for item in body] if isinstance(body, list) else body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"model": WRITER, "messages": TURNS}),
        ("completions", {"model": WRITER, "prompt": "Hello"}),
        ("embeddings", {"model": EMBEDDER, "input": "Hello"}),
        ("responses", {"model": WRITER, "input": "Hello", "store": False}),
        ("chat/completions", {"model": "none", "messages": TURNS}),
        ("chat/completions", {"model": WRITER, "messages": "wrong"}),
        ("nothing", {}),
    ],
)
async def test_a_reply_is_the_same_as_below_v1(store, path, body):
    replies = []
    async with writing(store) as (client, *_):
        for prefix in ("/v1/", "/v3/"):
            async with client.post(prefix + path, json=body) as reply:
                text = (await reply.text()).replace("/v3/", "/v1/")
                replies.append((reply.status, reply.content_type, text))
        async with client.get("/v1/models") as first, client.get("/v3/models") as second:
            assert await first.json() == await second.json()
    first, second = [(status, kind, steady(json.loads(text))) for status, kind, text in replies]
    assert first == second


async def test_a_request_below_v3_streams(store):
    async with (
        writing(store) as (client, *_),
        client.post("/v3/chat/completions", json={"model": WRITER, "messages": TURNS, "stream": True}) as reply,
    ):
        assert (await reply.text()).endswith("data: [DONE]\n\n")
