"""Tools whose schemas refer to themselves, beside a schema for the answer: on real weights."""

import json

import jsonschema_rs
import pytest

# Up to 90 tokens twice, under a grammar: some take more than 5 s where the machine has other work.
pytestmark = pytest.mark.timeout(120)

MODEL = "smollm2"


def objects(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


# The same name means another thing in each tool; the third refers to the whole of itself.
TOOLS = {
    "paint": {"$defs": {"X": {"enum": ["red", "blue"]}}, **objects(shade={"$ref": "#/$defs/X"})},
    "count": {"$defs": {"X": {"type": "integer", "minimum": 0, "maximum": 9}}, **objects(number={"$ref": "#/$defs/X"})},
    "list": {"type": "object", "properties": {"value": {"enum": [1, 2]}, "rest": {"$ref": "#"}}, "required": ["value"]},
}
ANSWER = {"$defs": {"X": {"enum": ["yes", "no"]}}, **objects(answer={"$ref": "#/$defs/X"})}
QUESTION = "Which colour has the sky?"


async def chat(http, node, fields):
    if isinstance(choice := fields.get("tool_choice"), dict):
        fields = fields | {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 90} | fields
    body = {"tools": tools, "response_format": wanted} | body
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert "X-NPU-Node-Ignored" not in reply.headers
        if not fields["stream"]:
            (choice,) = (await reply.json())["choices"]
            calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
            return [(c["name"], c["arguments"]) for c in calls], choice["message"]["content"], choice["finish_reason"]
        chunks = [json.loads(line[6:])["choices"][0] async for line in reply.content if line.startswith(b"data: {")]
    calls, text = [], ""
    for delta in (chunk["delta"] for chunk in chunks):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return calls, text, chunks[-1]["finish_reason"]


CHOICES = ["auto", "required", {"type": "function", "name": "list"}, "none"]


# Each as a stream or whole, in turn.
@pytest.mark.parametrize(("choice", "stream"), [(choice, number % 2 > 0) for number, choice in enumerate(CHOICES)])
async def test_the_reply_is_a_call_or_an_answer_that_matches(http, whole_node, choice, stream):
    for seed in range(1, 9):
        wanted = {"tool_choice": choice, "stream": stream, "temperature": 0.9, "seed": seed}
        calls, text, end = await chat(http, whole_node, wanted)
        if end == "length":
            continue  # the model may go on with itself; each try is drawn anew
        if choice != "auto":
            assert bool(calls) == (choice != "none")
        assert bool(calls) != bool(text)
        for name, arguments in calls:
            assert not isinstance(choice, dict) or name == choice["name"]
            jsonschema_rs.Draft202012Validator(TOOLS[name]).validate(json.loads(arguments))
        if text:
            jsonschema_rs.Draft202012Validator(ANSWER).validate(json.loads(text))
        return
    pytest.fail("no reply was complete")


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_matches_its_schema_after_calls_that_did_not(http, whole_node, stream):
    messages = []
    for number, city in enumerate(("Rome", "Berlin", "Oslo")):
        # A small model copies these where nothing holds it.
        function = {"name": "weather", "arguments": json.dumps({"city": city, "note": "please", "days": "many"})}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "sunny"},
        ]
    messages.append({"role": "user", "content": "Weather in Paris?"})
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    fields = {"messages": messages, "tools": tools, "response_format": None, "max_tokens": 60}
    calls, _, _ = await chat(http, whole_node, fields | {"stream": stream, "temperature": 0})
    assert calls
    for name, arguments in calls:
        assert name == "weather"
        found = json.loads(arguments)
        assert set(found) == {"city", "days"}
        jsonschema_rs.Draft202012Validator(WEATHER).validate(found)
