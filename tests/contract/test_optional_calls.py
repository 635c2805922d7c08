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


async def responses(http, whole_node, fields):
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    items = []
    for number, city in enumerate(CITIES):
        items += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"type": "function_call", "call_id": f"c{number}", "name": "weather", "arguments": json.dumps(wrong(city))},
            {"type": "function_call_output", "call_id": f"c{number}", "output": "sunny"},
        ]
    items.append({"role": "user", "content": "Weather in Paris?"})
    body = {"model": MODEL, "input": items, "tools": tools, "max_output_tokens": 60, "store": False} | fields
    async with http.post(whole_node.url + "/v1/responses", json=body) as reply:
        assert reply.status == 200
        if not fields["stream"]:
            output = (await reply.json())["output"]
        else:
            events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
            output = events[-1]["response"]["output"]
    return [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]


async def ollama(http, whole_node, fields):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages = []
    for city in CITIES:
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": wrong(city)}}]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
        ]
    messages.append({"role": "user", "content": "Weather in Paris?"})
    options = {"num_predict": 60} | {name: value for name, value in fields.items() if name != "stream"}
    body = {"model": MODEL, "messages": messages, "tools": tools, "stream": fields["stream"], "options": options}
    async with http.post(whole_node.url + "/api/chat", json=body) as reply:
        assert reply.status == 200
        frames = [json.loads(line) async for line in reply.content]
    calls = [call["function"] for frame in frames for call in frame["message"].get("tool_calls") or []]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize(("dialect", "stream"), [(chat, False), (chat, True), (responses, True), (ollama, False)])
async def test_the_arguments_of_a_call_match_the_schema(http, whole_node, dialect, stream):
    calls = await dialect(http, whole_node, {"stream": stream, "temperature": 0})
    assert calls
    for name, arguments in calls:
        assert name == "weather"
        assert matches(arguments), arguments


async def test_a_schema_that_cannot_be_enforced_is_listed(http, whole_node):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "tools": tools, "max_tokens": 4}
    async with http.post(whole_node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert reply.headers["X-NPU-Node-Ignored"] == "tools_0_.function.parameters.properties.a.pattern"
