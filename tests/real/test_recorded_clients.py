"""Request bodies as clients and frameworks in common use send them, recorded from the clients themselves."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real]

RECORDED = Path(__file__).parents[1] / "data" / "clients"
# Enough for a reply of every form, and little enough to be quick.
_LIMITS = {"/chat/completions": "max_tokens", "/completions": "max_tokens", "/responses": "max_output_tokens"}


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
    refused = []
    for number, recorded in enumerate(_bodies(client)):
        path = recorded["path"]
        async with http.post(node.url + path, json=_shortened(path, recorded["body"])) as reply:
            text = await reply.text()
            if reply.status != 200:
                refused.append(f"line {number + 1}, {path}: {reply.status} {text[:300]}")
            elif "text/event-stream" in reply.headers["Content-Type"]:
                assert "event: error" not in text, text[-500:]
                assert 'data: {"error"' not in text, text[-500:]
    assert not refused, "\n".join(refused)
