"""A disk that does not answer: every route that reads the files of models answers by the deadline, others go on."""

import threading

import pytest

from tests.support.application import application
from worker_node.models.sources import LocalReference
from worker_node.settings import NodeSettings

NAME = "not-served-yet"
MESSAGES = [{"role": "user", "content": "hello"}]
ASKING = {
    "GET /models": None,
    f"GET /models/{NAME}": None,
    f"POST /models/{NAME}/load": None,
    f"POST /models/{NAME}/unload": None,
    f"DELETE /models/{NAME}": None,
    "GET /v1/models": None,
    f"GET /v1/models/{NAME}": None,
    "GET /api/tags": None,
    "POST /models/pull": {"name": "/net/a-server-that-is-gone/model"},
    "POST /api/pull": {"model": "/net/a-server-that-is-gone/model"},
    "POST /embeddings": {"model": NAME, "texts": ["hello"]},
    "POST /inference": {"model": NAME, "prompt": "hello"},
    "POST /v1/embeddings": {"model": NAME, "input": "hello"},
    "POST /v1/completions": {"model": NAME, "prompt": "hello"},
    "POST /v1/chat/completions": {"model": NAME, "messages": MESSAGES},
    "POST /v1/responses": {"model": NAME, "input": "hello"},
    "POST /v2/rerank": {"model": NAME, "query": "hello", "documents": ["a"]},
    "POST /tokenize": {"model": NAME, "prompt": "hello"},
    "POST /detokenize": {"model": NAME, "tokens": [1]},
    "POST /api/chat": {"model": NAME, "messages": MESSAGES},
    "POST /api/chat ": {"model": NAME, "messages": [], "keep_alive": 0},
    "POST /api/generate": {"model": NAME, "prompt": "hello"},
    "POST /api/embed": {"model": NAME, "input": "hello"},
    "POST /api/show": {"model": NAME},
    "DELETE /api/delete": {"model": NAME},
}


@pytest.fixture
async def dead_disk(tmp_path, monkeypatch):
    """A client of a node without models, whose store answers once `go` is set."""
    go = threading.Event()
    async with application(settings=NodeSettings(model_store=tmp_path, pull_roots=["/net"])) as (client, node):
        store = node.manager.store
        real = store.directories

        def wait():
            go.wait()
            return real()

        def hang(path):
            go.wait()
            return LocalReference(tmp_path / path.name)

        store.directories = wait
        monkeypatch.setattr("worker_node.models.sources.LocalReference", hang)
        try:
            yield client, go
        finally:
            go.set()
            await node.manager.stop()


@pytest.mark.linux  # by the name of its disk
@pytest.mark.parametrize("wanted", ASKING)
async def test_every_route_answers_by_its_deadline(dead_disk, wanted):
    client, go = dead_disk
    method, path = wanted.split()
    headers = {"X-Request-Timeout-Ms": "50"}
    async with client.request(method, path, json=ASKING[wanted], headers=headers) as reply:
        body = await reply.json()
        assert reply.status == 504, body
    assert "the deadline passed while the files of models were read" in str(body["error"])
    async with client.get("/health") as reply:
        assert reply.status in {200, 503}, "the node answers what needs no disk"
    go.set()
    async with client.get("/models") as reply:
        assert (await reply.json())["models"] == []
