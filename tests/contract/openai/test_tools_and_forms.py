"""Forced calls, penalties and narrow choices, on real weights."""

import json

import pytest

from tests.contract.openai.test_generation import chat, complete, stream

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


async def test_a_forced_call_streams(http, node):
    _, frames = await stream(http, node, messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=80)
    chunks = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["id"].startswith("call_")
    assert all("id" not in call and call["index"] == 0 for call in calls[1:])
    assert len(calls) > 5
    arguments = json.loads("".join(call["function"]["arguments"] for call in calls))
    assert (set(arguments), arguments["unit"] in {"celsius", "fahrenheit"}) == ({"city", "unit"}, True)
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert chunks[-1]["delta"] == {}


async def test_each_penalty_changes_the_answer(http, node):
    wanted = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
    _, plain = await complete(http, node, **wanted)
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2.0}):
        _, penalised = await complete(http, node, **wanted, **penalty)
        assert penalised["choices"][0]["text"] != plain["choices"][0]["text"], penalty


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 0.99}, {"top_p": 0}, {"top_p": 1e-6}])
async def test_a_narrow_choice_is_the_greedy_one(http, node, narrow):
    _, greedy = await chat(http, node)
    _, sampled = await chat(http, node, temperature=1.0, seed=3, **narrow)
    assert sampled["choices"] == greedy["choices"]
