"""Prompts for queries and documents, and vectors cut to a declared size, in every dialect and through the client.

The application, its dialects and the tokenizer are real and asked over HTTP; the engine is scripted.
"""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from backend_client import NPUClient, RequestRejected
from backend_client.sdk.client import openai_over
from tests.support.application import application, built_models, with_engine
from tests.support.task_engine import encoded
from tests.support.writing import EMBEDDER, WritingEngine
from worker_node.settings import NodeSettings

pytestmark = pytest.mark.real

PROMPTS = {"query": "query: ", "document": "passage: "}
PATHS = ("/embeddings", "/v1/embeddings", "/api/embed")
FIELD = {"/embeddings": "texts", "/v1/embeddings": "input", "/api/embed": "input"}


class Embedder(WritingEngine):
    """Gives every text the vector 1, 2, 3, …, at unit length."""

    async def embed(self, tokens, *, deadline, interactive):
        self.jobs += [list(row) for row in tokens]
        row = np.arange(1, 385, dtype=np.float32)
        row /= np.linalg.norm(row)
        return encoded(np.repeat(row[None], len(tokens), axis=0))


@contextlib.asynccontextmanager
async def embedding(store, cache=0, **fields):
    (model,) = built_models(store, EMBEDDER, settings=NodeSettings(embedding_cache=cache))
    engine = Embedder()
    model = with_engine(replace(model, installed=replace(model.installed, **fields)), engine)
    async with application([model]) as (client, _):
        yield client, model, engine


async def post(client, path, text="cats", **fields):
    async with client.post(path, json={"model": EMBEDDER, FIELD[path]: text} | fields) as reply:
        return reply, await reply.json()


async def test_an_empty_text_is_what_it_is_in_each_dialect(store):
    async with embedding(store) as (client, _, engine):
        reply, body = await post(client, "/embeddings", "")
        assert (reply.status, vectors_of(body).shape, len(engine.jobs)) == (200, (1, 384), 1)
        for text, param in (("", "input"), (["cats", ""], "input[1]")):
            reply, body = await post(client, "/v1/embeddings", text)
            assert (reply.status, body["error"]["param"]) == (400, param)
        reply, body = await post(client, "/api/embed", "")
        assert (reply.status, body["embeddings"]) == (200, [])
        async with client.post("/api/embeddings", json={"model": EMBEDDER, "prompt": ""}) as reply:
            assert (reply.status, await reply.json()) == (200, {"embedding": []})
        assert len(engine.jobs) == 1


def vectors_of(body):
    return np.asarray(body["embeddings"] if "embeddings" in body else [row["embedding"] for row in body["data"]])


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
async def test_a_text_gets_the_prompt_of_its_input_type_by_every_name_of_it(store, path):
    async with embedding(store, prompts=PROMPTS) as (client, model, engine):
        names = {None: "", "query": "query: ", "search_query": "query: "}
        names |= dict.fromkeys(("document", "search_document", "passage"), "passage: ")
        for name, prompt in names.items():
            reply, body = await post(client, path, input_type=name)
            assert reply.status == 200, body
            assert reply.headers["X-Space"] == model.space
            (expected,) = await model.tokenizer.encode([prompt + "cats"], truncate=False)
            assert engine.jobs.pop() == expected
            assert int(reply.headers["X-NPU-Node-Token-Count"]) == len(expected)


async def test_the_prompt_counts_against_the_context(store):
    async with embedding(store, prompts=PROMPTS) as (client, model, engine):
        text = "a " * (model.tokenizer.limit - 2)
        assert (await post(client, "/embeddings", text))[0].status == 200
        reply, body = await post(client, "/embeddings", text, input_type="query")
        assert (reply.status, body["error"]["code"]) == (400, "context_length_exceeded")
        await post(client, "/embeddings", text, input_type="query", truncate=True)
        assert len(engine.jobs[-1]) == model.tokenizer.limit


async def test_health_lists_what_a_model_declares(store):
    async with embedding(store, prompts=PROMPTS, matryoshka=(64, 128)) as (client, _, _):
        async with client.get("/health") as reply:
            (told,) = (await reply.json())["models"]
        assert (told["input_types"], told["matryoshka"]) == (["document", "query"], [64, 128])
    async with embedding(store) as (client, *_), client.get("/health") as reply:
        (told,) = (await reply.json())["models"]
    assert not {"input_types", "matryoshka"} & told.keys()


async def test_a_model_without_prompts_refuses_the_input_type_or_lists_it_as_ignored(store):
    async with embedding(store) as (client, _, engine):
        reply, body = await post(client, "/embeddings", input_type="query")
        assert (reply.status, body["error"]["param"]) == (400, "input_type")
        assert "queries and documents alike" in body["error"]["message"]
        assert not engine.jobs
        reply, _ = await post(client, "/v1/embeddings", input_type="query")
        assert (reply.status, reply.headers["X-NPU-Node-Ignored"]) == (200, "input_type")
    (model,) = built_models(store, EMBEDDER)
    settings = NodeSettings(unknown_fields="reject")
    async with application([with_engine(model, Embedder())], settings) as (client, _):
        assert (await post(client, "/v1/embeddings", input_type="query"))[0].status == 400


async def test_an_input_type_for_another_use_and_token_ids_have_no_prompt(store):
    async with embedding(store, prompts=PROMPTS) as (client, *_):
        reply, body = await post(client, "/embeddings", input_type="clustering")
        assert (reply.status, body["error"]["param"]) == (400, "input_type")
        reply, _ = await post(client, "/v1/embeddings", input_type="clustering")
        assert (reply.status, reply.headers["X-NPU-Node-Ignored"]) == (200, "input_type")
        reply, body = await post(client, "/v1/embeddings", [101, 102], input_type="query")
        assert (reply.status, body["error"]["param"]) == (400, "input_type")


# With a cache: a cut vector must not be kept in place of the whole one.
@pytest.mark.parametrize("path", PATHS)
async def test_vectors_are_cut_to_a_declared_size_at_unit_length_in_a_space_of_their_own(store, path):
    async with embedding(store, cache=10, matryoshka=(64, 128)) as (client, model, _):
        whole = np.arange(1, 385) / np.linalg.norm(np.arange(1, 385))
        for size in (64, 384, 128, None):
            reply, body = await post(client, path, dimensions=size)
            assert reply.status == 200, body
            head = whole[:size]
            np.testing.assert_allclose(vectors_of(body)[0], head / np.linalg.norm(head), atol=1e-6)
            assert reply.headers["X-Space"] == (model.space if size in (384, None) else f"{model.space}-{size}")
        reply, body = await post(client, path, dimensions=100)
        assert reply.status == 400
        assert "64, 128, 384" in str(body)


@pytest.mark.parametrize("path", PATHS)
async def test_other_models_refuse_other_sizes(store, path):
    async with embedding(store) as (client, *_):
        assert (await post(client, path, dimensions=384))[0].status == 200
        reply, body = await post(client, path, dimensions=64)
        assert reply.status == 400
        assert "was not trained to be cut" in str(body)


async def test_the_client_sends_both_and_checks_the_space_of_what_was_cut(store):
    async with embedding(store, prompts=PROMPTS, matryoshka=(64,)) as (served, model, engine):
        url = str(served.make_url("/")).rstrip("/")
        async with NPUClient([url]) as client:
            result = await client.embed_result("cats", input_type="query", dimensions=64)
            assert (len(result.vector), result.space) == (64, f"{model.space}-64")
            assert engine.jobs == await model.tokenizer.encode(["query: cats"], truncate=False)
            assert (await client.embed_result("cats")).space == model.space
            with pytest.raises(RequestRejected) as caught:
                await client.embed("cats", dimensions=100)
            assert caught.value.param == "dimensions"
        async with NPUClient([url], spaces={EMBEDDER: model.space}) as client:
            assert (await client.embed_many(["a", "b"], dimensions=64)).shape == (2, 64)
            async with openai_over(client) as openai:
                for field in ({"dimensions": 64}, {"dimensions": 64, "encoding_format": "float"}):
                    reply = await openai.embeddings.create(model=EMBEDDER, input="cats", **field)
                    assert len(reply.data[0].embedding) == 64
