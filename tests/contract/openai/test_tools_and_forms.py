"""Tools, forms of the answer, log probabilities and penalties, on real weights."""

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
COIN = {"name": "flip_coin"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": COIN}]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


async def test_a_forced_call_streams(http, node):
    _, frames = await stream(http, node, messages=QUESTION, tools=TOOLS[:1], tool_choice="required", max_tokens=80)
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


async def test_auto_and_none_leave_the_model_free(http, node):
    _, without = await chat(http, node, messages=QUESTION)
    _, none = await chat(http, node, messages=QUESTION, tools=TOOLS, tool_choice="none")
    _, auto = await chat(http, node, messages=QUESTION, tools=TOOLS)
    assert none["choices"] == without["choices"]
    assert none["usage"]["total_tokens"] == without["usage"]["total_tokens"]
    assert auto["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]


async def test_an_answer_is_a_json_object(http, node):
    wanted = {"response_format": {"type": "json_object"}, "max_tokens": 24, "temperature": 0.8}
    ended = 0
    for seed in range(4):
        _, body = await chat(http, node, messages=[{"role": "user", "content": "Hello"}], seed=seed, **wanted)
        (choice,) = body["choices"]
        assert choice["message"]["content"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            ended += 1
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert ended


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
