"""Tools and items of /v1/responses as OpenAI's types have them, and what the node passes over or refuses of them.

The application and its tokenizer are real and asked over HTTP; the engine writes a given text.
"""

import json
from pathlib import Path

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.recogniser import Recogniser
from tests.support.writing import WRITER, writing

CODEX = Path(__file__).parents[3] / "data" / "clients" / "codex.jsonl"
HEADER = "X-NPU-Node-Ignored"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK_UP = {"type": "function", "name": "look_up", "parameters": CITY}
MAPS = {"type": "namespace", "name": "maps", "description": "Maps of cities", "tools": [LOOK_UP]}
RUN = {"type": "custom", "name": "run", "description": "Run a program"}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
SEARCH = {"type": "web_search", "search_context_size": "low"}
PROMISE = {"type": "to_be_invented", "future": {"a": 1}}
EVENT = TypeAdapter(ResponseStreamEvent)


def called(name, **arguments):
    return f"<tool_call>[{json.dumps({'name': name, 'arguments': arguments})}]</tool_call>"


async def ask(client, **fields):
    async with client.post("/v1/responses", json={"model": WRITER, "input": "Hi"} | fields) as reply:
        return reply, await reply.json()


async def events(client, **fields):
    async with client.post("/v1/responses", json={"model": WRITER, "input": "Hi", "stream": True} | fields) as reply:
        lines = (await reply.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def test_requests_of_codex_are_answered_and_calls_carry_their_namespace(store):
    async with writing(store, called("multi_agent_v1.close_agent", target="a")) as (client, _, engine):
        for line in CODEX.read_text().splitlines():
            body = json.loads(line)["body"] | {"model": WRITER, "stream": False}
            reply, answer = await ask(client, **body)
            assert reply.status == 200, answer
            assert "tools.web_search" in reply.headers[HEADER]
            (call,) = answer["output"]
            assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent_v1", "close_agent")
            Response.model_validate(answer)
            # The developer's turns are one, and so are the user's: templates that alternate take them.
            instructions, question, *_ = engine.prompt.removeprefix("<|im_start|>").split("<|im_start|>")
            assert "<permissions instructions>" in instructions
            assert "<environment_context>" in question
            assert "run echo hi" in question


async def test_a_namespace_is_offered_as_functions_and_past_calls_of_it_have_the_same_name(client, engine):
    past = [
        {
            "type": "function_call",
            "call_id": "c",
            "namespace": "maps",
            "name": "look_up",
            "arguments": '{"city": "Bern"}',
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "here"}]},
    ]
    await ask(client, input=past, tools=[MAPS, LOOK_UP])
    assert "maps: Maps of cities" in engine.prompt
    assert engine.prompt.count('"name": "maps.look_up"') == 2
    await ask(client, tools=[MAPS, LOOK_UP], tool_choice={"type": "function", "name": "look_up", "namespace": "maps"})
    held = Recogniser(engine.jobs[-1].grammar)
    assert held.admits('{"name":"maps.look_up","arguments":{"city":"Bern"}}')
    assert not held.admits('{"name":"look_up","arguments":{"city":"Bern"}}')


async def test_a_custom_tool_takes_a_text_and_its_calls_are_custom_calls(store):
    async with writing(store, called("run", input='print("a")\n')) as (client, _, engine):
        streamed = await events(client, tools=[RUN])
        kinds = [event["type"] for event in streamed]
        for event in streamed:
            EVENT.validate_python(event)
        (item,) = streamed[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", 'print("a")\n')
        assert kinds[2:6] == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "a"}
        reply, _ = await ask(client, input=[item, result], tools=[RUN])
        assert reply.status == 200
        assert '"arguments": {"input": "print(\\"a\\")\\n"}' in engine.prompt


async def test_a_custom_call_that_is_cut_has_no_half_input(store):
    text = called("run", input="print(12345)")
    async with writing(store, text) as (client, _, engine):
        length = len(engine.tokenizer.encode_prompt(text.partition("12345")[0]))
        _, answer = await ask(client, tools=[RUN], max_output_tokens=length)
    (item,) = answer["output"]
    assert (answer["status"], item["status"], item["input"]) == ("incomplete", "incomplete", "")


async def test_tools_that_nobody_can_call_here_are_passed_over_and_listed(client, engine):
    reply, answer = await ask(client, tools=[SEARCH, PROMISE, LOOK_UP, MAPS | {"tools": [PATCH]}])
    assert reply.status == 200
    assert reply.headers[HEADER].split(", ") == ["tools.custom", "tools.to_be_invented", "tools.web_search"]
    assert "web_search" not in engine.prompt
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
    reply, _ = await ask(client, tools=[SEARCH], tool_choice="auto")
    assert reply.status == 200


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "maps"},
        {"type": "function", "name": "look_up", "namespace": "maps"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        "sometimes",
    ],
)
async def test_a_choice_of_what_was_passed_over_or_is_no_tool_is_refused(client, engine, choice):
    reply, answer = await ask(client, tools=[SEARCH, PATCH, LOOK_UP], tool_choice=choice)
    assert reply.status == 400
    assert answer["error"]["param"].startswith("tool_choice")
    assert engine.jobs == []


async def test_only_what_was_passed_over_cannot_be_required(client):
    reply, answer = await ask(client, tools=[SEARCH], tool_choice="required")
    assert (reply.status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"type": "local_shell_call", "call_id": "c", "action": {"type": "exec"}}, "local_shell_call"),
        ({"type": "compaction", "encrypted_content": "x"}, "compaction"),
        ({"type": "to_be_invented"}, "to_be_invented"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name"),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}],
            },
            "input[1].output[0].image_url: smollm2-135m-instruct does not read images",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, "input_file"),
    ],
)
async def test_items_whose_content_cannot_be_used_are_refused_by_name(client, item, named):
    reply, answer = await ask(client, input=[{"role": "user", "content": "Hi"}, item])
    assert reply.status == 400
    assert answer["error"]["param"].startswith("input[1]")
    assert named in answer["error"]["message"]


async def test_items_without_text_for_the_model_are_passed_over(client, engine):
    turns = [
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not."}]},
        {"role": "user", "content": "Hi"},
    ]
    reply, _ = await ask(client, input=turns)
    assert (reply.status, reply.headers[HEADER]) == (200, "input.web_search_call")
    assert "I would rather not." in engine.prompt


@pytest.mark.parametrize("length", [1, 5])
async def test_a_forced_call_that_is_cut_is_neither_text_nor_a_call(store, length):
    text = json.dumps({"name": "look_up", "arguments": {"city": "Bern"}})
    chat = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
    body = {"model": WRITER, "messages": [{"role": "user", "content": "Hi"}], "tools": [chat]}
    async with writing(store, text) as (client, *_):
        _, answer = await ask(client, tools=[LOOK_UP], tool_choice="required", max_output_tokens=length)
        assert (answer["status"], answer["output"]) == ("incomplete", [])
        body |= {"tool_choice": "required", "max_tokens": length}
        async with client.post("/v1/chat/completions", json=body) as reply:
            (choice,) = (await reply.json())["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "a " * 9000}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "use_beam_search": True}, "use_beam_search"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9},
            "max_completion_tokens",
        ),
        ("/v1/completions", {"prompt": "a", "n_predict": 9}, "n_predict"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "best_of": 9}, "best_of"),
    ],
)
async def test_an_error_names_the_field_that_was_sent(store, path, fields, param):
    async with (
        writing(store, max_tokens_limit=8, best_of_limit=2) as (client, *_),
        client.post(path, json={"model": WRITER} | fields) as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, param)
