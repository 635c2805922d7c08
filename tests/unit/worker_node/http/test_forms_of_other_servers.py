"""Forms of the answer, levels of thinking and cut conversations, as vLLM, llama.cpp and Ollama ask for them.

The engine is scripted: what it is given is the prompt and the grammar.
"""

import json

import pytest

from tests.support.recogniser import Recogniser
from tests.support.writing import WRITER, writing

CHAT, COMPLETIONS, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/chat"
TURNS = [{"role": "user", "content": "Hello"}]
AGE = {"type": "object", "properties": {"age": {"enum": [1, 22]}}, "required": ["age"]}


async def post(client, path, **body):
    prompt = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": TURNS}
    async with client.post(path, json={"model": WRITER, **prompt, **body}) as reply:
        return reply, json.loads(await reply.text()) if reply.content_type == "application/json" else None


WORDS = ["good", 'so "so"', "bäd\n"]
# Fields of a request, answers of its form, and others.
CHOICE = (WORDS, ["", "bad", '"good"', "goodso"])
SCHEMA = (['{"age": 22}'], ['{"age": 2}'])
EXPRESSION = (["abcd", "cccdd"], ["", "abc", "abcdx", "dddd"])
FORMS = [
    ({"guided_choice": WORDS}, CHOICE),
    ({"structured_outputs": {"choice": WORDS}}, CHOICE),
    ({"structured_outputs": {"choices": WORDS}}, CHOICE),
    ({"guided_json": AGE}, SCHEMA),
    ({"guided_json": json.dumps(AGE)}, SCHEMA),
    ({"structured_outputs": {"json": AGE}}, SCHEMA),
    ({"json_schema": AGE}, SCHEMA),
    ({"guided_regex": "[a-c]{3}d+"}, EXPRESSION),
    ({"structured_outputs": {"regex": "^[a-c]{3}d+$"}}, EXPRESSION),
    ({"guided_regex": "[a-c]{3}d{1,}", "grammar": "", "json_schema": None}, EXPRESSION),
]
CASES = [(path, *form) for form in FORMS for path in (CHAT, COMPLETIONS)]
CASES += [(CHAT, {"response_format": {"type": name, "schema": AGE}}, SCHEMA) for name in ("json_object", "json_schema")]


@pytest.mark.parametrize(("path", "form", "answers"), CASES)
async def test_an_answer_has_the_form_that_was_asked_for(store, path, form, answers):
    async with writing(store) as (client, _, engine):
        reply, _ = await post(client, path, **form)
    assert reply.status == 200
    assert "X-NPU-Node-Ignored" not in reply.headers
    held, (admitted, refused) = Recogniser(engine.jobs[-1].grammar), answers
    assert all(map(held.admits, admitted))
    assert not any(map(held.admits, refused))


async def test_a_forced_call_counts_and_not_the_expression_beside_it(store):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with writing(store) as (client, _, engine):
        await post(client, CHAT, tools=[tool], tool_choice="required", guided_regex="yes|no")
    held = Recogniser(engine.jobs[-1].grammar)
    assert held.admits('{"name": "look", "arguments": {}}')
    assert not held.admits("yes")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_json": AGE, "guided_choice": ["a"]}, "structured_outputs"),
        ({"guided_json": AGE, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_choice": ["a", "b\x00c"]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 257}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": {"a": 1}, "regex": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(a)\\1"}}, "structured_outputs.regex"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema.type"),
    ],
)
async def test_what_is_no_form_is_refused(store, form, param):
    async with writing(store) as (client, _, engine):
        reply, body = await post(client, CHAT, **form)
    assert reply.status == 400, body
    assert body["error"]["param"] == param
    assert engine.jobs == []


@pytest.mark.parametrize(
    ("think", "error"),
    [
        ("low", "does not support thinking"),
        ("max", "does not support thinking"),
        ("loud", "'low', 'medium', 'high' or 'max'"),
        (5, "valid boolean"),
    ],
)
async def test_levels_of_thinking_are_known(store, think, error):
    async with writing(store) as (client, *_):
        reply, body = await post(client, OLLAMA, think=think, stream=False)
    assert reply.status == 400
    assert error in body["error"]


async def test_a_long_conversation_is_cut_as_ollama_cuts_it(store):
    turns = [{"role": "system", "content": "Be brief."}]
    turns += [{"role": role, "content": f"{number} " * 60} for number in range(9) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "Now?"})
    small = {"messages": turns, "stream": False, "options": {"num_ctx": 300, "num_predict": 4}}
    async with writing(store) as (client, _, engine):
        for more in ({}, {"truncate": True}):
            reply, body = await post(client, OLLAMA, **small, **more)
            assert reply.status == 200, body
            assert "truncate" not in reply.headers.get("X-NPU-Node-Ignored", "")
            prompt = engine.tokenizer.decode(list(memoryview(engine.jobs[-1].tokens).cast("i")))
            assert "Be brief." in prompt
            assert "Now?" in prompt
            assert "0 0 0" not in prompt
        reply, body = await post(client, OLLAMA, **small, truncate=False)
    assert reply.status == 400
    assert "num_ctx" in body["error"]


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "no JSON", "null"])
async def test_a_past_call_may_have_malformed_arguments(store, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": "c", "content": "the arguments are no JSON object"}
    turns = [*TURNS, {"role": "assistant", "tool_calls": [call]}, told]
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "the arguments are no JSON object"}
    async with writing(store) as (client, _, engine):
        reply, body = await post(client, CHAT, messages=turns)
        assert reply.status == 200, body
        async with client.post("/v1/responses", json={"model": WRITER, "input": [item, output]}) as answer:
            assert answer.status == 200
        for job in engine.jobs:
            prompt = engine.tokenizer.decode(list(memoryview(job.tokens).cast("i")))
            assert json.dumps(arguments) in prompt


async def test_responses_take_the_sampling_of_local_servers(store):
    async with writing(store) as (client, _, engine):
        fields = {"top_k": 3, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.5, "presence_penalty": 0.5, "stop": "x"}
        async with client.post("/v1/responses", json={"model": WRITER, "input": "Hello", **fields}) as reply:
            assert reply.status == 200
            assert "X-NPU-Node-Ignored" not in reply.headers
    (job,) = engine.jobs
    assert (job.top_k, job.min_p, job.seed, job.repetition_penalty, job.presence_penalty) == (3, 0.1, 7, 1.5, 0.5)


async def test_tokens_as_llama_cpp_tells_them(store):
    async with writing(store) as (client, *_):
        body = {"model": WRITER, "content": "Hello wörld", "with_pieces": True}
        async with client.post("/tokenize", json=body) as reply:
            tokens = (await reply.json())["tokens"]
        ids = [token["id"] for token in tokens]
        pieces = [piece.encode() if isinstance(piece := token["piece"], str) else bytes(piece) for token in tokens]
        assert b"".join(pieces).decode() == "Hello wörld"
        async with client.post("/detokenize", json={"model": WRITER, "tokens": ids}) as reply:
            assert (await reply.json())["content"] == "Hello wörld"
        async with client.post("/tokenize", json={"model": WRITER, "content": "a", "prompt": "b"}) as reply:
            assert reply.status == 400
