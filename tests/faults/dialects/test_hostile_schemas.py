"""Schemas made to be dear, beside live streams over real sockets: they are refused, and nothing else notices."""

import asyncio
import json

import pytest

# 18 refusals and 4 answers beside two streams: 10 s alone, nearly all of it the engine's.
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"


def _texts(count, most):
    return {f"f{i}": {"type": "string", "maxLength": most + i} for i in range(count)}


HOSTILE = {
    "many lengths": {"type": "object", "properties": _texts(360, 17), "required": [f"f{i}" for i in range(360)]},
    "any of many lengths": {"anyOf": [{"type": "string", "maxLength": 40 + i} for i in range(300)]},
    "a large allOf": {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(12_000)]},
    "a smaller allOf": {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(4000)]},
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "minimum": 3}}},
    "splits": {"type": "string", "pattern": "^(.{1,60}){2}$"},
}
SMALL = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
# 25 KB whose texts share one length: dear once, and admitted now.
LARGE = {"type": "object", "properties": {f"f{i}": {"type": "string", "maxLength": 2000} for i in range(360)}}
LARGE["required"] = list(LARGE["properties"])


def chat(schema):
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
    return "/v1/chat/completions", {"response_format": form, "max_tokens": 16}


def forced_tool(schema):
    tool = {
        "type": "function",
        "function": {"name": "call", "parameters": {"type": "object", "properties": {"x": schema}}, "strict": True},
    }
    return "/v1/chat/completions", {"tools": [tool], "tool_choice": "required", "max_tokens": 16}


def ollama(schema):
    return "/api/chat", {"format": schema, "stream": False, "options": {"num_predict": 16}}


FORMS = [chat, forced_tool, ollama]


async def post(http, node, path, body):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Answer in JSON."}]} | body
    async with http.post(node.url + path, json=body) as reply:
        return reply.status, await reply.json()


async def stream(http, node, tokens):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count."}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        lines = [line.strip() async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    return sum(bool(json.loads(line[6:])["choices"][0]["delta"].get("content")) for line in lines[:-1])


async def test_hostile_schemas_are_refused_and_live_streams_go_on(node, http):
    before = node.engine_pids()[MODEL]
    streams = [asyncio.create_task(stream(http, node, 30)) for _ in range(2)]
    refused = [post(http, node, *form(schema)) for schema in HOSTILE.values() for form in FORMS]
    admitted = [post(http, node, *form(schema)) for schema in (SMALL, LARGE) for form in (chat, ollama)]
    both = asyncio.gather(asyncio.gather(*refused), asyncio.gather(*admitted))
    while not both.done():
        async with asyncio.timeout(5), http.get(node.url + "/health") as reply:
            assert reply.status == 200
        await asyncio.wait([both], timeout=0.05)
    refusals, answers = await both
    # 413: a body of more values than are parsed.
    assert {status for status, _ in refusals} <= {400, 413}
    assert all("engine" not in json.dumps(body) for _, body in refusals)
    assert [status for status, _ in answers] == [200] * len(answers), answers
    assert all(count > 0 for count in await asyncio.gather(*streams))
    assert node.engine_pids()[MODEL] == before
