"""Where an answer has a form, only the form ends it: neither stop strings nor ignore_eos, which the reply lists.

On real weights over HTTP, with stop strings that frameworks send by default and others that occur in every answer.
"""

import json
import re

import jsonschema_rs
import pytest

from tests.contract.openai.test_generation import CAPITAL, MODEL

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2, "maxLength": 9}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
STOPS = ["\nObservation", '"', ":", "}", "a", "e", "-"]
CHOICES = ["heads-up", "tails-up"]
TOOL = {"name": "note", "description": "Note it", "parameters": SCHEMA}


def is_valid(text):
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


async def chat(http, node, **fields):
    async with http.post(
        node.url + "/v1/chat/completions", json={"model": MODEL, "messages": CAPITAL} | fields
    ) as reply:
        assert reply.status == 200, await reply.text()
        (choice,) = (await reply.json())["choices"]
    calls = choice["message"].get("tool_calls")
    return reply, calls[0]["function"]["arguments"] if calls else choice["message"]["content"], choice["finish_reason"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA, "strict": True}}
FORCED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
# Fields of a request, and whether a text has their form.
FORMS = {
    "a schema": ({"response_format": FORMAT}, is_valid),
    "a choice": ({"guided_choice": CHOICES}, CHOICES.__contains__),
    "an expression": ({"guided_regex": "[a-e]{3}-[0-9]{2}"}, re.compile("[a-e]{3}-[0-9]{2}").fullmatch),
    "a forced call": (FORCED, is_valid),
}


@pytest.mark.parametrize("ending", [{"stop": STOPS}, {"ignore_eos": True}], ids=["stop", "ignore_eos"])
@pytest.mark.parametrize("name", FORMS)
async def test_an_answer_ends_where_its_form_ends_whatever_else_would_end_it(http, node, name, ending):
    fields, fits = FORMS[name]
    reply, text, finish = await chat(http, node, **fields, **ending)
    assert fits(text), text
    assert finish == ("tool_calls" if fields is FORCED else "stop")
    assert reply.headers["X-NPU-Node-Ignored"] == next(iter(ending))


async def test_options_ignore_eos_of_ollamas_dialect_goes_on_and_is_not_listed_as_ignored(http, node):
    body = {"model": MODEL, "prompt": "Hello", "stream": False, "options": {"num_predict": 40, "ignore_eos": True}}
    async with http.post(node.url + "/api/generate", json=body) as reply:
        answer = await reply.json()
    assert (answer["eval_count"], answer["done_reason"]) == (40, "length")
    assert "X-NPU-Node-Ignored" not in reply.headers
    body["options"]["ignore_eos"] = "yes, please"
    async with http.post(node.url + "/api/generate", json=body) as reply:
        assert reply.status == 400


async def test_stop_strings_cut_free_text_beside_tools(http, node):
    tools = [{"type": "function", "function": TOOL}]
    _, whole, _ = await chat(http, node, tools=tools, max_tokens=16)
    stop = whole[5:7]
    reply, text, finish = await chat(http, node, tools=tools, max_tokens=16, stop=stop)
    assert (text, finish) == (whole[: whole.index(stop)], "stop")
    assert "X-NPU-Node-Ignored" not in reply.headers
