"""A name of a model has vectors of one space, whichever ways its calls take: random scenarios in virtual time.

Nodes of two spaces come and go, and a cloud of one of them answers in between."""

import asyncio
import json
import random

import numpy as np
import pytest

from backend_client import InferenceClient, NPUClient
from backend_client.calls import BaseClient
from backend_client.cloud import Ledger
from backend_client.errors import NodeUnreachable, NPUError
from backend_client.http.messages import Reply, Request
from backend_client.http.replies import Forwarded, TokenCount
from backend_client.http.routes import texts_to_embed
from backend_client.lifetime import Deadline
from backend_client.results import EmbedBatch, Origin, Usage, origin_fields
from backend_client.sdk.routes import OpenAIRoutes, embedding_reply
from backend_client.testing.node import json_answer, model_row, vectors
from tests.unit.backend_client.virtual_time import in_virtual_time, now

MODEL, SPACES = "minilm", ("space-a", "space-b")


def rows_in(space, count):
    """Vectors that show their space."""
    return [[1.0, float(SPACES.index(space))]] * count


class Nodes:
    """Nodes by URL, each in a vector space, or None while it is down."""

    def __init__(self, spaces):
        self.spaces = spaces

    async def request(self, node, method, path, body, headers, *, probe=False):
        await asyncio.sleep(0.001)
        space = self.spaces[node]
        if space is None:
            raise NodeUnreachable("cannot connect", node=node)
        answer = self._answer(path, space, json.loads(body) if body else {})
        return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.body)

    def _answer(self, path, space, body):
        if path == "/health":
            row = {"id": MODEL, **model_row("embedding"), "dimensions": 2, "space": space}
            return json_answer({"status": "ready", "models": [row]})
        texts = body.get("texts") or body.get("input") or [body["prompt"]]
        rows = rows_in(space, 1 if isinstance(texts, str) else len(texts))
        if path == "/embeddings":
            return vectors(MODEL, rows, 2, space)
        forms = {
            "/v1/embeddings": {"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)]},
            "/api/embed": {"embeddings": rows},
            "/api/embeddings": {"embedding": rows[0]},
        }
        return json_answer(forms[path], {"X-Model": MODEL, "X-Space": space})

    async def parts(self, node, path, body, headers, *, lively):
        yield await self.request(node, "POST", path, body, headers)

    async def close(self):
        pass


class Cloud(BaseClient):
    """It has a model for one space."""

    def __init__(self, space):
        self.ledger = Ledger({})
        self.service = self
        self.spaces = (space,)

    async def close(self):
        pass

    def refusal(self, request):
        return None if request.space.name in {None, *self.spaces} else "it has no model for this space"

    async def embed(self, request):
        await asyncio.sleep(0.001)
        found = np.array(rows_in(self.spaces[0], len(texts_to_embed(request))), np.float32)
        named = {"source": "cloud", "node": "cloud", "model": "cloud", "device": None, "request_id": "request"}
        return EmbedBatch(vectors=found, space=self.spaces[0], usage=Usage(1), **named)

    async def forward(self, request):
        batch = await self.embed(request)
        content = embedding_reply(batch, None).content
        return Forwarded({}, Origin(**origin_fields(batch)), [], TokenCount(), content)


async def embed(client, model):
    return (await client.embed_many(["a", "b"], model=model))[:, 1]


async def data_set(client, model):
    return (await client.embed_batch(["a", "b"], model=model, priority="batch")).vectors[:, 1]


async def sdk(client, model, **fields):
    body = json.dumps({"input": ["a", "b"], **fields} | ({"model": model} if model else {}))
    reply = await OpenAIRoutes(client).handle("POST", "/v1/embeddings", {}, body.encode(), 30)
    return [row["embedding"][1] for row in json.loads(reply.content)["data"]] if reply.status == 200 else []


async def forward(client, model, path, body):
    request = Request(
        path=path,
        kind="embedding",
        body=body,
        content=json.dumps(body | ({"model": model} if model else {})).encode(),
        model=model,
        deadline=Deadline.after(30, now),
    )
    found = await client.core.backend.forward(request)
    data = json.loads(found.content) if found.content[:1] == b"{" else {}
    if "data" in data:
        return [row["embedding"][1] for row in data["data"]]
    if "embeddings" in data or "embedding" in data:
        return [row[1] for row in data.get("embeddings") or [data["embedding"]]]
    return np.frombuffer(found.content, "<f4").reshape(-1, 2)[:, 1]


WAYS = (
    embed,
    data_set,
    sdk,
    lambda client, model: sdk(client, model, truncate=True),
    lambda client, model: forward(client, model, "/v1/embeddings", {"input": ["a", "b"]}),
    lambda client, model: forward(client, model, "/v1/embeddings", {"input": "a", "truncate": True}),
    lambda client, model: forward(client, model, "/embeddings", {"texts": ["a"]}),
    lambda client, model: forward(client, model, "/api/embed", {"input": "a"}),
    lambda client, model: forward(client, model, "/api/embeddings", {"prompt": "a"}),
)


async def scenario(rng):
    """The spaces of the vectors that each name of the model got, None for no name."""
    urls = [f"http://n{number}:1" for number in range(rng.randint(1, 3))]
    nodes = Nodes({url: rng.choice([None, *SPACES]) for url in urls})
    npu = NPUClient(urls, transport=lambda: nodes, clock=now, rng=random.Random(rng.random()))
    seen = {None: set(), MODEL: set()}
    async with InferenceClient(npu, Cloud(rng.choice(SPACES)), clock=now) as client:
        for _ in range(12):
            if rng.random() < 0.4:
                nodes.spaces[rng.choice(urls)] = rng.choice([None, *SPACES])
                await asyncio.sleep(rng.choice([0, 5]))
            model = rng.choice([None, MODEL])
            calls = [rng.choice(WAYS)(client, model) for _ in range(rng.randint(1, 3))]
            for found in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(found, BaseException):
                    assert isinstance(found, NPUError), found
                else:
                    seen[model].update(found)
    return seen


@pytest.mark.parametrize("part", range(4))
@in_virtual_time
async def test_no_mixture_of_ways_gives_one_name_vectors_of_two_spaces(part):
    answered = 0
    for seed in range(15 * part, 15 * (part + 1)):
        seen = await scenario(random.Random(seed))
        assert all(len(spaces) <= 1 for spaces in seen.values()), (seed, seen)
        answered += sum(map(len, seen.values()))
    assert answered > 15
