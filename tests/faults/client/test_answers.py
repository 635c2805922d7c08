"""Every answer of a node is checked in the same way, whoever asked: one that is wrong is answered by the other node."""

import base64
import contextlib
import math

import numpy as np
import pytest
from aiohttp import web

import backend_client
from backend_client import ClientSettings, NPUClient
from backend_client.testing.node import EMBEDDER, RERANKER
from tests.faults.scripted_node import ScriptedNode

GOOD = [0.5] * 8


def encoded(vector):
    return base64.b64encode(np.float32(vector).tobytes()).decode()


def row(vector, index=0):
    return {"object": "embedding", "index": index, "embedding": vector}


VECTORS = {
    "one NaN": [row([0.5] * 7 + [math.nan])],
    "infinite": [row([math.inf] + [0.5] * 7)],
    "beyond float32": [row([1e300] * 8)],
    "zeros": [row([0.0] * 8)],
    "strings": [row(["0.5"] * 8)],
    "booleans": [row([True] * 8)],
    "no vector": [row(None)],
    "a short one": [row([0.5] * 4)],
    "no base64": [row("%%%")],
    "cut base64": [row(encoded(GOOD)[:-6])],
    "NaN in base64": [row(encoded([math.nan] * 8))],
    "two for one text": [row(GOOD, 0), row(GOOD, 1)],
    "another index": [row(GOOD, 1)],
    "an index that is no number": [row(GOOD, "0")],
    "no list": None,
}
REQUESTS = {
    "token ids": {"input": [1, 2, 3]},
    "dimensions": {"input": "text", "dimensions": 8},
    "base64": {"input": [[1, 2, 3]], "encoding_format": "base64"},
}


@contextlib.asynccontextmanager
async def pair_with(reply):
    """Two nodes, of which the one that is asked first gives this reply once."""
    replies = [reply]

    async def respond(request):
        body = replies.pop() if replies else {"object": "list", "model": EMBEDDER, "data": [row(GOOD)], "usage": {}}
        if not replies and body is not reply and request.path == "/v1/rerank":
            return None
        headers = {"X-Space": "space-a", "X-Model": EMBEDDER if request.path == "/v1/embeddings" else RERANKER}
        return web.json_response(body, headers=headers)

    one, two = ScriptedNode(), ScriptedNode()
    for node in (one, two):
        node.offer("rerank", RERANKER)
        node.respond = respond
    async with one.running(), two.running():
        yield one, two


@pytest.mark.parametrize("fault", VECTORS)
async def test_vectors_that_are_wrong_reach_nobody(fault):
    wrong = {"object": "list", "model": EMBEDDER, "data": VECTORS[fault], "usage": {}}
    for request in REQUESTS.values():
        async with pair_with(wrong) as nodes, NPUClient([node.url for node in nodes]) as client:
            reply = await client.post("/v1/embeddings", {"model": EMBEDDER, **request})
            assert reply.body["data"] == [row(GOOD)]
            assert [attempt.outcome for attempt in reply.attempts] == ["BadReply", "ok"]
        async with pair_with(wrong) as nodes:
            settings = ClientSettings(nodes=[node.url for node in nodes])
            async with backend_client.openai(settings) as openai:
                found = await openai.embeddings.create(model=EMBEDDER, **request)
            assert [each.embedding for each in found.data] == [GOOD]
            assert [len(node.requests) for node in nodes] == [1, 1]


def ranking(*rows):
    return {"results": [{"index": index, "relevance_score": score} for index, score in rows]}


@pytest.mark.parametrize(
    "reply",
    [
        ranking((0, 0.5), (2, 0.4)),
        ranking((0, 0.5), (0, 0.4)),
        ranking((0, 0.5), (1, math.nan)),
        ranking((0, 0.5), (1, math.inf)),
        ranking((0, 0.5), (1, "0.4")),
        ranking((0, 0.5), (1, True)),
        ranking((0, 0.5)),
        ranking((0, 0.5), (1, 0.4), (2, 0.3)),
        [],
    ],
)
async def test_rankings_that_are_wrong_reach_nobody(reply):
    request = {"model": RERANKER, "query": "q a", "documents": ["a", "b"]}
    right = [(0, 0.5), (1, 0.0)]
    async with pair_with(reply) as nodes, NPUClient([node.url for node in nodes]) as client:
        found = await client.post("/v1/rerank", request)
        assert [(each["index"], each["relevance_score"]) for each in found.body["results"]] == right
        assert [attempt.outcome for attempt in found.attempts] == ["BadReply", "ok"]
    async with pair_with(reply) as nodes, NPUClient([node.url for node in nodes]) as client:
        ranked = await client.rerank("q a", ["a", "b"])
        assert [(document.index, document.score) for document in ranked.documents] == right
    async with pair_with(reply) as nodes:
        async with backend_client.openai(ClientSettings(nodes=[node.url for node in nodes])) as openai:
            raw = await openai.post("/rerank", cast_to=object, body=request)
        assert [each["index"] for each in raw["results"]] == [0, 1]
