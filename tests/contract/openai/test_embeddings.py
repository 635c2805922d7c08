"""POST /v1/embeddings on real weights."""

import numpy as np
import pytest

MODEL = "all-minilm-l6-v2"


async def embeddings(http, node, **body):
    async with http.post(node.url + "/v1/embeddings", json={"model": MODEL, **body}) as reply:
        return reply, await reply.json()


def vectors(reply):
    assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    return np.array([item["embedding"] for item in reply["data"]], np.float32)


async def test_equals_the_native_route(http, node):
    texts = ["one text", "another", " "]
    reply, body = await embeddings(http, node, input=texts)
    async with http.post(node.url + "/embeddings", json={"texts": texts}) as native:
        expected = np.array((await native.json())["embeddings"], np.float32)
    assert body["object"] == "list"
    assert body["model"] == MODEL
    assert np.abs(vectors(body) - expected).max() < 2e-3
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    assert reply.headers["X-NPU-Node-Device"] == "CPU"
    assert reply.headers["X-NPU-Node-Token-Count"] == str(body["usage"]["prompt_tokens"])


async def test_token_ids_are_the_text(http, node):
    _, text = await embeddings(http, node, input=["hello", "world"])
    _, ids = await embeddings(http, node, input=[[101, 7592, 102], [101, 2088, 102]])
    _, one = await embeddings(http, node, input=[101, 7592, 102])
    assert np.abs(vectors(text) - vectors(ids)).max() < 2e-3
    assert len(one["data"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "normalize": False}, "normalize"),
        ({"input": [30_000_000]}, None),
        ({"input": []}, "input"),
        ({"input": "word " * 1000}, "texts[0]"),
        ({}, "input"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(http, node, fields, param):
    reply, body = await embeddings(http, node, **fields)
    assert reply.status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["error"]["param"] or "").startswith(param or "")
