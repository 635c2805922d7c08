"""Request bodies as clients and frameworks in common use send them, recorded from the clients themselves."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real]

RECORDED = Path(__file__).parents[1] / "data" / "clients"
# Enough for a reply of every form, and little enough to be quick.
_LIMITS = {"/chat/completions": "max_tokens", "/completions": "max_tokens", "/responses": "max_output_tokens"}


# Lines that are refused today, and why. A line that passes must be taken off this list; it is to become empty.
PENDING = {
    ("instructor", 1): "$ref in a tool's parameters",
    ("instructor", 2): "$ref in a tool's parameters",
    ("instructor", 3): "$ref in a tool's parameters",
    ("instructor", 4): "$ref in a tool's parameters",
    ("openai_agents", 4): "$ref in a tool's parameters",
    ("openai_agents", 6): "a schema together with tools",
    ("openai_agents", 7): "a schema together with tools",
    ("openai_agents", 8): "$ref in a tool's parameters",
    ("openai_agents", 14): "$ref in a tool's parameters",
    ("openai_agents", 16): "a schema together with tools",
    ("openai_agents", 17): "a schema together with tools",
    ("openai_agents", 18): "$ref in a tool's parameters",
    ("pydantic_ai", 4): "$ref in a tool's parameters",
    ("pydantic_ai", 9): "$ref in a tool's parameters",
    ("semantic_kernel", 9): "store",
    ("semantic_kernel", 10): "previous_response_id",
}


def _bodies(client):
    return [json.loads(line) for line in (RECORDED / f"{client}.jsonl").read_text().splitlines()]


def _shortened(path, body):
    """The body with a small limit of new tokens: what is tested is that it is accepted."""
    if path.startswith("/api/"):
        if path in {"/api/chat", "/api/generate"}:
            body["options"] = {**(body.get("options") or {}), "num_predict": 4}
        return body
    name = next((limit for end, limit in _LIMITS.items() if path.endswith(end)), None)
    if name is not None:
        body.pop("max_completion_tokens", None)
        body[name] = 4
    return body


@pytest.mark.parametrize("client", sorted(path.stem for path in RECORDED.glob("*.jsonl")))
async def test_every_recorded_body_is_accepted(node, http, client):
    refused, passed = [], set()
    for number, recorded in enumerate(_bodies(client), start=1):
        path = recorded["path"]
        async with http.post(node.url + path, json=_shortened(path, recorded["body"])) as reply:
            text = await reply.text()
            if reply.status != 200:
                if (client, number) not in PENDING:
                    refused.append(f"line {number}, {path}: {reply.status} {text[:300]}")
                continue
            passed.add((client, number))
            if "text/event-stream" in reply.headers["Content-Type"]:
                assert "event: error" not in text, text[-500:]
                assert 'data: {"error"' not in text, text[-500:]
    assert not refused, "\n".join(refused)
    assert not passed & PENDING.keys(), "these pass now: take them off PENDING"
