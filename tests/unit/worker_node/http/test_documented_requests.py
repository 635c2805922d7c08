"""Requests in the forms that the reference servers document: accepted, or refused by name for a real limit."""

import json
from pathlib import Path

import pytest

from tests.support.writing import EMBEDDER, WRITER, writing

DOCUMENTED = Path(__file__).parents[3] / "data" / "documented"


@pytest.mark.parametrize("source", sorted(path.stem for path in DOCUMENTED.glob("*.jsonl")))
async def test_documented_requests(store, source):
    async with writing(store) as (client, *_):
        for line in (DOCUMENTED / f"{source}.jsonl").read_text().splitlines():
            shown = json.loads(line)
            body = shown["body"] | {"model": EMBEDDER if "embed" in shown["path"] else WRITER}
            async with client.post(shown["path"], json=body) as reply:
                text = await reply.text()
                refused = shown.get("refused")
                assert reply.status == (400 if refused else 200), (shown, text)
                assert refused is None or refused in text
