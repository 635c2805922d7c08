"""Pages for people, and the requests that they document."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.application import application
from tests.support.task_engine import encoded
from tests.support.task_models import RANKER, placement, ranker
from tests.support.writing import EMBEDDER, WRITER, WritingEngine, writing_models
from worker_node.app import operations
from worker_node.settings import NodeSettings

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
async def client():
    async with application([], NodeSettings(api_keys=["key-0123456789abcdef"])) as (client, _):
        yield client


async def page(client, path, **headers):
    async with client.get(path, headers=BROWSER | headers) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/html"
        return reply, await reply.text()


async def test_a_browser_gets_links_and_a_program_what_ollamas_clients_look_for(client):
    _, html = await page(client, "/")
    assert {"/dashboard", "/play", "/docs", "/openapi.json", "/health", "/metrics"} <= set(
        re.findall(r'href="([^"]+)"', html)
    )
    for accept in ("*/*", "application/json", ""):
        async with client.get("/", headers={"Accept": accept}) as reply:
            assert (await reply.text(), reply.headers["Vary"]) == ("Ollama is running", "Accept")


async def test_the_examples_name_the_address_that_was_asked(client):
    _, html = await page(client, "/", Host="npu.example:8081")
    assert "curl http://npu.example:8081/embeddings" in html


async def test_the_reference_holds_every_operation(client):
    _, html = await page(client, "/docs")
    for operation in operations():
        assert f"{operation.method.upper()}</span> <code>{operation.template}</code>" in html
    assert "max_new_tokens" in html


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_run_nothing_and_load_nothing_from_elsewhere(client, path):
    reply, html = await page(client, path)
    assert "<script" not in html
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


DOCUMENTED = Path(__file__).parents[3] / "data" / "documented"


SERVED = {"embed": EMBEDDER, "rerank": RANKER}


class Ranking(WritingEngine):
    async def embed(self, tokens, *, deadline, interactive):
        return encoded(np.ones(len(tokens)))


@pytest.fixture
async def asked(store):
    """A client of a node with a model of each task that takes texts."""
    ranks = ranker(store, [placement(RANKER, Ranking())], aliases=["ms-marco-minilm"])
    async with application([*writing_models(store, WritingEngine()), ranks]) as (client, _):
        yield client


@pytest.mark.parametrize("source", sorted(path.stem for path in DOCUMENTED.glob("*.jsonl")))
async def test_documented_requests(asked, source):
    """A line may have the reason why its request is refused, and the status of that."""
    for line in (DOCUMENTED / f"{source}.jsonl").read_text().splitlines():
        shown = json.loads(line)
        body, refused = shown["body"], shown.get("refused")
        if body is not None:
            body |= {"model": next((model for part, model in SERVED.items() if part in shown["path"]), WRITER)}
        async with asked.request(shown.get("method", "POST"), shown["path"], json=body) as reply:
            text = await reply.text()
            assert reply.status == shown.get("status", 400 if refused else 200), (shown, text)
            assert refused is None or refused in text, (shown, text)


ROOT = Path(__file__).parents[4]
OURS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "worker_node/http/pages.py")
CURL = re.compile(
    r"curl (?:ORIGIN|http://127\.0\.0\.1:8081|localhost:8081)(/[\w/]+)[^']*?(?:'Content[^']*'[^']*)?-d '([^']*)'"
)


@pytest.mark.parametrize("file", [file for file in OURS if CURL.search(file.read_text())], ids=lambda file: file.name)
async def test_requests_of_our_own_documents(asked, file):
    for path, body in CURL.findall(file.read_text()):
        async with asked.post(path, data=body) as reply:
            assert reply.status == 200, (path, body, await reply.text())
