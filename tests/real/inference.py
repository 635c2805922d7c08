"""Requests to a node's own routes over HTTP, and vectors to compare its own with."""

import json
from pathlib import Path

import numpy as np

# Made by sentence-transformers in float32.
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "minilm-reference.json").read_text(encoding="utf-8"))
VECTORS = np.asarray(REFERENCE["vectors"], np.float32)


def worst_cosine(vectors, expected=VECTORS):
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return float((np.einsum("nd,nd->n", vectors, expected) / norms).min())


async def post(http, node, path, body, headers=None):
    async with http.post(node.url + path, json=body, headers=headers) as reply:
        return reply.status, reply.headers, await reply.read()


async def ask(http, node, body, headers=None, path="/inference"):
    status, headers, content = await post(http, node, path, body, headers)
    assert status == 200, content
    return headers, json.loads(content)


async def stream(http, node, body, on_event):
    """Send each event of a streamed answer to `on_event(name, data)` until that returns False."""
    async with http.post(node.url + "/inference", json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        name = ""
        async for line in reply.content:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: ") and on_event(name, json.loads(line[6:])) is False:
                return
