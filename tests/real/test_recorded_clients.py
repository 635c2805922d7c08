"""Request bodies as clients and frameworks in common use send them, recorded from the clients themselves."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RECORDED = Path(__file__).parents[1] / "data" / "clients"
CLIENTS = sorted(path.stem for path in RECORDED.glob("*.jsonl"))
_LIMITS = {"/chat/completions": "max_tokens", "/completions": "max_tokens", "/responses": "max_output_tokens"}


def _bodies(client):
    return [json.loads(line) for line in (RECORDED / f"{client}.jsonl").read_text().splitlines()]


def _shortened(path, body):
    """The body with a limit of one new token: what is tested is that it is accepted."""
    if path.startswith("/v1/messages"):
        return {**body, "max_tokens": 1} if "max_tokens" in body else body
    if path.startswith("/api/"):
        if path in {"/api/chat", "/api/generate"}:
            body["options"] = {**(body.get("options") or {}), "num_predict": 1}
        return body
    name = next((limit for end, limit in _LIMITS.items() if path.endswith(end)), None)
    if name is not None:
        body.pop("max_completion_tokens", None)
        body[name] = 1
    return body


async def _refused(node, http, bodies):
    refused = []
    for number, recorded in enumerate(bodies, start=1):
        path, body = recorded["path"], _shortened(recorded["path"], recorded["body"])
        body.pop("previous_response_id", None)  # nodes store nothing
        async with http.post(node.url + path, json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                refused.append(f"line {number}, {path}: {reply.status} {text[:300]}")
                continue
            if "text/event-stream" in reply.headers["Content-Type"]:
                assert "event: error" not in text, text[-500:]
                assert 'data: {"error"' not in text, text[-500:]
    return refused


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_recorded_body_is_accepted(node, http, client):
    assert await _refused(node, http, _bodies(client)) == []
