"""Fields of other servers' APIs: unknown ones are ignored and listed, what cannot be honoured is refused.

The application, its dialects and tokenizers are real and asked over HTTP; the engine is scripted.
"""

import re

import pytest

from tests.support.writing import EMBEDDER, WRITER, writing
from worker_node.settings import NodeSettings
from worker_node.tasks.embed.http import EMBEDDINGS
from worker_node.tasks.generate.http.ollama import GenerateBody
from worker_node.tasks.generate.http.openai import ChatBody, CompletionsBody
from worker_node.tasks.generate.http.responses import ResponsesBody

HEADER = "X-NPU-Node-Ignored"
TURN = {"role": "user", "content": "Hello"}
BODIES = {
    "/v1/chat/completions": {"model": WRITER, "messages": [TURN]},
    "/v1/completions": {"model": WRITER, "prompt": "Hello"},
    "/v1/embeddings": {"model": EMBEDDER, "input": "Hello"},
    "/v1/responses": {"model": WRITER, "input": "Hello"},
    "/api/generate": {"model": WRITER, "prompt": "Hello", "stream": False},
    "/api/chat": {"model": WRITER, "messages": [TURN], "stream": False},
    "/api/embed": {"model": EMBEDDER, "input": "Hello"},
}
TABLES = {
    "/v1/chat/completions": ChatBody.rules,
    "/v1/completions": CompletionsBody.rules,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": ResponsesBody.rules,
    "/api/generate": GenerateBody.rules,
}


async def post(client, path, **fields):
    async with client.post(path, json=BODIES[path] | fields) as reply:
        return reply, await reply.text()


def listed(reply):
    return reply.headers.get(HEADER, "").split(", ")


async def test_what_cannot_be_honoured_is_refused_by_name_unless_it_asks_for_nothing(client):
    for path, table in TABLES.items():
        nothing = [dict.fromkeys(table, value) for value in (None, False)]
        nothing += [{name: value} for name, rule in table.items() for value in rule.neutral]
        for fields in nothing:
            reply, text = await post(client, path, **fields)
            assert (reply.status, HEADER in reply.headers) == (200, False), (path, fields, text)
        for name in table:
            reply, text = await post(client, path, **{name: ["something"]})
            assert (reply.status, name in text) == (400, True), (path, name)


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_ignored_and_listed(client, path):
    reply, text = await post(client, path, invented={"a": 1}, empty=None)
    assert reply.status == 200, text
    assert listed(reply) == ["invented"]


async def test_fields_within_parts_are_listed_by_path(client):
    turn = {
        "role": "user",
        "cache_breakpoint": True,
        "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
    }
    reply, text = await post(client, "/v1/chat/completions", messages=[turn, turn])
    assert reply.status == 200, text
    assert listed(reply) == ["messages.cache_breakpoint", "messages.content.cache_control"]


async def test_streams_list_ignored_fields_too(client):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat"):
        reply, _ = await post(client, path, stream=True, invented=1)
        assert listed(reply) == ["invented"]


async def test_rejecting_restores_strictness_and_nothing_is_ever_ignored(store):
    async with writing(store, settings=NodeSettings(unknown_fields="reject")) as (client, *_):
        for path, name in ((path, "invented") for path in BODIES):
            reply, text = await post(client, path, **{name: "x"})
            assert reply.status == 400, (path, name)
            assert name in text
            assert HEADER not in reply.headers
        reply, text = await post(client, "/v1/chat/completions", messages=[TURN | {"invented": 1}])
        assert reply.status == 400
        assert "messages.invented" in text


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CHOICE = {"guided_choice": ["yes"], "stop": ["x"]}
# A set of strings, as pydantic writes it.
UNENFORCED = {"type": "object", "properties": {"tags": {"type": "array", "items": {}, "uniqueItems": True}}}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": UNENFORCED}}
UNIQUE = "response_format.json_schema.schema.properties.tags.uniqueItems"


def taking(pattern):
    """A tool whose argument has this expression."""
    text = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": text}}]}


# A part that has no effect here, and its place in the list.
WITHOUT_EFFECT = [
    ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, "tools.web_search"),
    ("/v1/chat/completions", taking("(?<=x)y"), "tools_0_.function.parameters.properties.a.pattern"),
    # Over a bound: calls are left free.
    ("/v1/chat/completions", taking("^(.{1,60}){2}$"), "tools_0_.function.parameters"),
    ("/v1/chat/completions", CHOICE, "stop"),
    ("/v1/chat/completions", {"response_format": FORM}, UNIQUE),
    ("/v1/chat/completions", {"response_format": FORM, "stream": True}, UNIQUE),
    ("/v1/completions", CHOICE, "stop"),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}, "stop": ["x"]}, "stop"),
    ("/api/chat", {"format": "json", "options": {"stop": ["x"]}}, "stop"),
    ("/api/chat", {"format": "json", "options": {"ignore_eos": True}}, "ignore_eos"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.web_search"),
    ("/v1/responses", {"store": True}, "store"),
    ("/v1/messages", {"tools": [SEARCH]}, "tools.web_search_20250305"),
    ("/v1/messages/count_tokens", {"tools": [SEARCH]}, "tools.web_search_20250305"),
    ("/api/generate", {"shift": True}, "shift"),
    ("/api/chat", {"format": {"type": "array", "items": {"enum": ["a"]}, "contains": {}}}, "format.contains"),
]


@pytest.mark.parametrize(("path", "fields", "place"), WITHOUT_EFFECT)
async def test_parts_without_effect_are_listed_or_refused(store, path, fields, place):
    body = BODIES.get(path) or {"model": WRITER, "messages": [TURN]}
    if path == "/v1/messages":
        body = body | {"max_tokens": 4}
    for mode, status in (("ignore", 200), ("reject", 400)):
        async with writing(store, "yes", settings=NodeSettings(unknown_fields=mode)) as (client, *_):
            async with client.post(path, json=body | fields) as reply:
                text = await reply.text()
            assert reply.status == status, text
            assert listed(reply) == [place] if mode == "ignore" else place in re.sub(r"[][]", "_", text)


@pytest.mark.parametrize("mode", ["ignore", "reject"])
async def test_the_native_api_is_strict(store, mode):
    native = {"/inference": {"prompt": "Hello"}, "/embeddings": {"texts": ["Hello"]}}
    async with writing(store, settings=NodeSettings(unknown_fields=mode)) as (client, *_):
        for path, body in native.items():
            for field in ("user", "invented"):
                async with client.post(path, json=body | {field: "x"}) as reply:
                    assert reply.status == 400
                    assert HEADER not in reply.headers


async def test_hostile_names_cannot_break_out_of_the_header_or_the_metrics(client, node):
    hostile = {
        "x\r\nSet-Cookie: a=b": 1,
        "y\x00\x1b[31m": 1,
        "a, b;c=d": 1,
        "ключ 🔑": 1,
        "": 1,
        "0": 1,
        "n" * 5000: 1,
    }
    reply, text = await post(client, "/v1/chat/completions", **hostile)
    assert reply.status == 200, text
    assert "Set-Cookie" not in reply.headers
    assert all(re.fullmatch(r"[A-Za-z*][A-Za-z0-9_.:*-]*", name) for name in listed(reply)), reply.headers[HEADER]
    for start in range(0, 3000, 1000):
        reply, _ = await post(client, "/v1/chat/completions", **{f"f{start + i}": 1 for i in range(1000)})
        assert reply.status == 200
        assert len(reply.headers[HEADER]) < 1500
        assert "and-more;fields=984" in listed(reply)
    for number in range(100):
        await post(client, "/v1/chat/completions", **{f"g{number}": 1})
    samples = [s for m in node.telemetry.ignored_fields.collect() for s in m.samples]
    assert len(samples) == 65
    assert {s.labels["field"]: s.value for s in samples}["other"] > 50
