"""Request bodies as clients and frameworks in common use send them, recorded from the clients themselves.

`make test` sends the bodies that have a field or a choice which none before them has, --long all of them.
"""

import json
import re
from pathlib import Path

import pytest

# Up to 12 requests (23 with --long) with grammars of their own: more than 5 s.
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RECORDED = Path(__file__).parents[1] / "data" / "clients"
CLIENTS = sorted(path.stem for path in RECORDED.glob("*.jsonl"))
_LIMITS = {"/chat/completions": "max_tokens", "/completions": "max_tokens", "/responses": "max_output_tokens"}


def _bodies(client):
    return [json.loads(line) for line in (RECORDED / f"{client}.jsonl").read_text().splitlines()]


def _fields(value, path):
    """Every field at any depth, and what it holds where the API names the choices: (path of names, value) pairs."""
    if isinstance(value, list):
        return set().union(*(_fields(item, path) for item in value))
    if isinstance(value, dict):
        # The names of a schema's properties are the caller's own.
        own = path and path[-1] in {"properties", "$defs"}
        return set().union(*(_fields(item, (*path, "*" if own else name)) for name, item in value.items()))
    chosen = isinstance(value, bool) or path[-1] in {"type", "role", "tool_choice", "format", "encoding_format"}
    return {(path, value if chosen else type(value))}


def _first_of_each_field():
    """(client, bodies) with those that bring a field, or a value of a choice, which none before them had."""
    seen = set()
    for client in CLIENTS:
        chosen, last_response = [], None
        for recorded in _bodies(client):
            fields = _fields(recorded["body"], (recorded["path"],))
            if not fields <= seen:
                # A response that continues another needs that one.
                continues = recorded["body"].get("previous_response_id") and last_response not in chosen
                chosen += [last_response, recorded] if continues else [recorded]
            seen |= fields
            if recorded["path"].endswith("/responses"):
                last_response = recorded
        if chosen:
            yield client, chosen


def _shortened(path, body):
    """The body with a limit of one new token: what is tested is that it is accepted."""
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
    """What the node says to those of the bodies that it refuses."""
    refused, latest = [], None
    for number, recorded in enumerate(bodies, start=1):
        path, body = recorded["path"], _shortened(recorded["path"], recorded["body"])
        if body.get("previous_response_id"):
            body["previous_response_id"] = latest  # the recorded one was of another node
        async with http.post(node.url + path, json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                refused.append(f"line {number}, {path}: {reply.status} {text[:300]}")
                continue
            latest = next(iter(re.findall(r'"(resp_[0-9a-f]+)"', text)), latest)
            if "text/event-stream" in reply.headers["Content-Type"]:
                assert "event: error" not in text, text[-500:]
                assert 'data: {"error"' not in text, text[-500:]
    return refused


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS)
async def test_every_recorded_body_is_accepted(node, http, client):
    assert await _refused(node, http, _bodies(client)) == []


@pytest.mark.parametrize(("client", "bodies"), [pytest.param(*case, id=case[0]) for case in _first_of_each_field()])
async def test_the_first_recorded_body_with_each_field_is_accepted(node, http, client, bodies):
    assert await _refused(node, http, bodies) == []
