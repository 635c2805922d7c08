"""Tools without a forced choice, on real weights: the model may answer in words, and a call matches its tool's schema.

The conversation has calls whose arguments do not match it, which a small model copies where nothing holds it.
"""

import json

import jsonschema_rs
import pytest

# Answers of some 40 tokens after the first use of a grammar: up to 10 s where the machine has other work.
pytestmark = pytest.mark.timeout(120)

MODEL = "smollm2"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
CITIES = ("Rome", "Berlin", "Oslo")


def matches(arguments):
    return jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(arguments) and set(arguments) == {"city", "days"}


def wrong(city):
    return {"city": city, "note": "please", "days": "many"}


async def chat(http, whole_node, fields):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages = []
    for number, city in enumerate(CITIES):
        function = {"name": "weather", "arguments": json.dumps(wrong(city))}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "sunny"},
        ]
    messages.append({"role": "user", "content": "Weather in Paris?"})
    body = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 60} | fields
    async with http.post(whole_node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert "X-NPU-Node-Ignored" not in reply.headers
        if not fields["stream"]:
            (choice,) = (await reply.json())["choices"]
            calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
            return [(call["name"], json.loads(call["arguments"])) for call in calls]
        chunks = [json.loads(line[6:])["choices"][0] async for line in reply.content if line.startswith(b"data: {")]
    calls = []
    for call in (call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])):
        if "id" in call:
            calls.append([call["function"]["name"], ""])
        calls[call["index"]][1] += call["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_arguments_of_a_call_match_the_schema(http, whole_node, stream):
    calls = await chat(http, whole_node, {"stream": stream, "temperature": 0})
    assert calls
    for name, arguments in calls:
        assert name == "weather"
        assert matches(arguments), arguments


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "string", "pattern": "(?<=x)y"}, ".properties.a.pattern"),
        # Over a bound: calls are left free.
        ({"type": "string", "pattern": "^(.{1,60}){2}$"}, ""),
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_listed(http, whole_node, part, place):
    parameters = {"type": "object", "properties": {"a": part}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "tools": tools, "max_tokens": 4}
    async with http.post(whole_node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert reply.headers["X-NPU-Node-Ignored"] == f"tools_0_.function.parameters{place}"
