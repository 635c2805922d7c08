"""What vLLM, llama.cpp and Ollama add to the API: forms, levels of thinking, cut conversations, tokens, usage.

The engine is scripted: what it is given is the prompt and the grammar.
"""

import asyncio
import json

import ollama
import pytest

from tests.support.application import application
from tests.support.events import sse
from tests.support.recogniser import Recogniser
from tests.support.task_models import HEARER, RANKER, hearer, placement, ranker
from tests.support.writing import EMBEDDER, WRITER
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.tasks.generate.messages import Sampling

CHAT, COMPLETIONS, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/chat"
TURNS = [{"role": "user", "content": "Hello"}]
AGE = {"type": "object", "properties": {"age": {"enum": [1, 22]}}, "required": ["age"]}


ASKED = {"messages": TURNS}
PROMPTS = {CHAT: ASKED, OLLAMA: ASKED, COMPLETIONS: {"prompt": "Hello"}, "/api/generate": {"prompt": "Hello"}}


async def post(client, path, **body):
    async with client.post(path, json={"model": WRITER, **PROMPTS.get(path, {}), **body}) as reply:
        return reply, await reply.json()


async def stream(client, path, **body):
    async with client.post(path, json={"model": WRITER, "stream": True, **body}) as reply:
        assert reply.status == 200, await reply.text()
        *chunks, _done = await sse(reply)
        return [json.loads(chunk) for chunk in chunks]


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
CASES += [(OLLAMA, {"format": AGE, "stream": False}, SCHEMA)]
ANY_OBJECT = (['{"a": 1}'], ["[1]", "a"])
CASES += [("/api/generate", {"format": "json", "stream": False}, ANY_OBJECT)]
CASES += [(CHAT, {"response_format": {"type": "json_object"}}, ANY_OBJECT)]


@pytest.mark.parametrize(("path", "form", "answers"), CASES)
async def test_an_answer_has_the_form_that_was_asked_for(client, engine, path, form, answers):
    reply, _ = await post(client, path, **form)
    assert reply.status == 200
    assert "X-NPU-Node-Ignored" not in reply.headers
    held, (admitted, refused) = Recogniser(engine.jobs[-1].grammar), answers
    assert all(map(held.admits, admitted))
    assert not any(map(held.admits, refused))


async def test_a_forced_call_counts_and_not_the_expression_beside_it(client, engine):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    await post(client, CHAT, tools=[tool], tool_choice="required", guided_regex="yes|no")
    held = Recogniser(engine.jobs[-1].grammar)
    assert held.admits('{"name": "look", "arguments": {}}')
    assert not held.admits("yes")


UNSUPPORTED = {
    *("logit_bias", "require_device", "use_beam_search"),
    *("structured_outputs.grammar", "structured_outputs.structural_tag"),
}


def strict(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_json": AGE, "guided_choice": ["a"]}, "guided_json"),
        ({"guided_json": AGE, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_choice": ["a", "b\x00c"]}, "guided_choice[1]"),
        ({"structured_outputs": {"structural_tag": {"a": 1}, "regex": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(a)\\1"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": strict({"uniqueItems": True})}, "response_format.json_schema.schema.uniqueItems"),
        ({"response_format": strict({"enum": []})}, "response_format.json_schema.schema.enum"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema.type"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 9, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "content": " "}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [[[[[1]]]]]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 10_000}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"require_device": "NPU"}, "require_device"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"use_beam_search": True}, "best_of"),
        ({"use_beam_search": True, "best_of": 4}, "use_beam_search"),
        ({"use_beam_search": True, "best_of": 4, "guided_choice": ["yes"]}, "use_beam_search"),
        ({"use_beam_search": True, "n": 4, "stream": True}, "stream"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"n": 0}, "n"),
        ({"n": 21}, "n"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_is_refused_before_the_engine(client, engine, form, param):
    reply, body = await post(client, CHAT, **form)
    assert reply.status == 400, body
    assert body["error"]["param"] == param
    assert param not in UNSUPPORTED or body["error"]["code"] == "unsupported_parameter"
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
async def test_levels_of_thinking_are_known(client, think, error):
    reply, body = await post(client, OLLAMA, think=think, stream=False)
    assert reply.status == 400
    assert error in body["error"]


async def test_a_long_conversation_is_cut_as_ollama_cuts_it(client, engine):
    turns = [{"role": "system", "content": "Be brief."}]
    turns += [{"role": role, "content": f"{number} " * 60} for number in range(9) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "Now?"})
    small = {"messages": turns, "stream": False, "options": {"num_ctx": 300, "num_predict": 4}}
    for more in ({}, {"truncate": True}):
        reply, body = await post(client, OLLAMA, **small, **more)
        assert reply.status == 200, body
        assert "truncate" not in reply.headers.get("X-NPU-Node-Ignored", "")
        assert "Be brief." in engine.prompt
        assert "Now?" in engine.prompt
        assert "0 0 0" not in engine.prompt
    reply, body = await post(client, OLLAMA, **small, truncate=False)
    assert reply.status == 400
    assert "num_ctx" in body["error"]


DEEP = '{"a": ' * 300 + "1" + "}" * 300


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "no JSON", "null", DEEP])
async def test_a_past_call_may_have_malformed_arguments(client, engine, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": "c", "content": "the arguments are no JSON object"}
    turns = [*TURNS, {"role": "assistant", "tool_calls": [call]}, told]
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "the arguments are no JSON object"}
    reply, body = await post(client, CHAT, messages=turns)
    assert reply.status == 200, body
    reply, _ = await post(client, "/v1/responses", input=[item, output])
    assert reply.status == 200
    for job in engine.jobs:
        prompt = engine.tokenizer.decode(list(memoryview(job.tokens).cast("i")))
        assert json.dumps(arguments) in prompt
        assert told["content"] in prompt


async def test_responses_take_the_sampling_of_local_servers(client, engine):
    fields = {"top_k": 3, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.5, "presence_penalty": 0.5, "stop": "x"}
    reply, _ = await post(client, "/v1/responses", input="Hello", **fields)
    assert reply.status == 200
    assert "X-NPU-Node-Ignored" not in reply.headers
    (job,) = engine.jobs
    assert job.sampling == Sampling(top_k=3, min_p=0.1, seed=7, repetition_penalty=1.5, presence_penalty=0.5)


@pytest.mark.parametrize(("fields", "length"), [({}, 16), ({"max_tokens": None}, 16), ({"n_predict": 20}, 20)])
async def test_a_completion_has_16_tokens_unless_its_length_is_named(client, engine, fields, length):
    reply, body = await post(client, COMPLETIONS, **fields)
    assert reply.status == 200, body
    assert engine.jobs[-1].max_new_tokens == length


@pytest.mark.parametrize("n", [1, 3])
async def test_every_chunk_tells_the_usage_so_far(client, engine, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await stream(client, CHAT, messages=TURNS, n=n, stream_options=options)
    whole = len(engine.tokenizer.encode_prompt(engine.text))
    for index in range(n):
        mine = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in mine] == [0, *range(1, whole + 1), whole]
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in mine)
    assert last["usage"]["completion_tokens"] == n * whole


@pytest.mark.parametrize("asked", [None, True])
async def test_every_chunk_but_the_last_has_no_usage_where_the_end_tells_it(client, asked):
    options = {"include_usage": asked, "continuous_usage_stats": not asked}
    *chunks, last = await stream(client, CHAT, messages=TURNS, stream_options=options)
    missing = object()
    assert {chunk.get("usage", missing) for chunk in chunks} == {None if asked else missing}
    assert bool(last.get("usage")) is bool(asked)


@pytest.mark.parametrize(
    ("fields", "may_stop"), [({}, False), ({"stop": ["sea"]}, True), ({"stop_token_ids": [5]}, True)]
)
async def test_the_engine_knows_whether_the_answer_may_be_stopped_where_it_is_read(client, engine, fields, may_stop):
    reply, body = await post(client, CHAT, **fields)
    assert reply.status == 200, body
    assert engine.jobs[-1].edge_may_stop is may_stop


@pytest.mark.parametrize(("temperature", "shown"), [(0, 1), (1, 0)])
async def test_more_logprobs_than_there_are_is_what_there_is(client, temperature, shown):
    reply, body = await post(client, CHAT, logprobs=True, top_logprobs=5, temperature=temperature)
    assert reply.status == 200, body
    assert reply.headers["X-NPU-Node-Ignored"] == f"top_logprobs;limited={shown}"
    assert {len(token["top_logprobs"]) for token in body["choices"][0]["logprobs"]["content"]} == {shown}
    fields = {"logprobs": True, "top_logprobs": shown, "temperature": temperature}
    reply, _ = await post(client, CHAT, **fields)
    assert "X-NPU-Node-Ignored" not in reply.headers


async def test_tokens_are_told_for_every_model_that_takes_texts(store, client, engine):
    reply, body = await post(client, "/tokenize", model=EMBEDDER, prompt="hello")
    assert (reply.status, body) == (200, {"count": 3, "max_model_len": 256, "tokens": [101, 7592, 102]})
    _, body = await post(client, "/tokenize", model=EMBEDDER, prompt="hello", add_special_tokens=False)
    assert body["tokens"] == [7592]
    _, body = await post(client, "/tokenize", model=EMBEDDER, content="hello")
    assert body["tokens"] == [7592]
    for wrong in ({"messages": TURNS}, {"prompt": "a", "with_pieces": True}, {}, {"prompt": "a " * 300}):
        reply, body = await post(client, "/tokenize", model=EMBEDDER, **wrong)
        assert reply.status == 400, wrong
    assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", "prompt")
    assert not engine.jobs
    models = [ranker(store, [placement(RANKER, engine)]), hearer(store, [placement(HEARER, engine)])]
    async with application(models) as (others, _):
        _, body = await post(others, "/tokenize", model=RANKER, prompt="hello")
        assert body["tokens"] == [101, 7592, 102]
        reply, body = await post(others, "/tokenize", model=HEARER, prompt="hello")
        assert (reply.status, body["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(("path", "text"), [(OLLAMA, "message"), ("/api/generate", "response")])
async def test_ollamas_answers_have_log_probabilities_in_its_clients_form(client, engine, path, text):
    form = ollama.ChatResponse if path == OLLAMA else ollama.GenerateResponse
    asked = {"logprobs": True, "top_logprobs": 5, "stream": False}
    reply, whole = await post(client, path, **asked, options={"temperature": 0})
    assert reply.headers["X-NPU-Node-Ignored"] == "top_logprobs;limited=1"
    tokens = form.model_validate(whole).logprobs
    assert "".join(token.token for token in tokens) == engine.text
    assert {(token.logprob, token.top_logprobs[0].token == token.token) for token in tokens} == {(-0.5, True)}
    # Ollama's own default is a temperature, with which the likeliest token is not known.
    reply, sampled = await post(client, path, **asked)
    assert reply.headers["X-NPU-Node-Ignored"] == "top_logprobs;limited=0"
    assert {len(token["top_logprobs"]) for token in sampled["logprobs"]} == {0}
    async with client.post(path, json={"model": WRITER, **PROMPTS[path], "logprobs": True}) as reply:
        *frames, last = [json.loads(line) for line in (await reply.text()).splitlines()]
    assert "logprobs" not in last
    said = [frame[text]["content"] if path == OLLAMA else frame[text] for frame in frames]
    assert "".join(said) == "".join(token["token"] for frame in frames for token in frame["logprobs"])
    reply, whole = await post(client, path, top_logprobs=5, stream=False)
    assert (reply.headers["X-NPU-Node-Ignored"], "logprobs" in whole) == ("top_logprobs", False)
    reply, whole = await post(client, path, stream=False, logprobs=True, top_logprobs=21)
    assert reply.status == 400


@pytest.mark.parametrize(
    ("path", "body"), [(OLLAMA, {"stream": False}), ("/api/embed", {"model": EMBEDDER, "input": "x"})]
)
async def test_ollamas_load_duration_is_the_wait_for_the_model_in_nanoseconds_and_in_no_other_duration(
    client, engine, path, body
):
    ready = engine.status

    async def next_change():
        await asyncio.sleep(0.05)
        engine.status = ready

    engine.next_change, engine.status = next_change, EngineStatus(EngineState.STARTING, "scripted")
    reply, told = await post(client, path, **body)
    assert reply.status == 200, told
    assert told["load_duration"] >= 40_000_000
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(told.get(name, 0) for name in parts) <= told["total_duration"]


async def test_ollamas_own_example_of_options_is_taken_and_what_has_no_effect_is_named(client):
    options = {"typical_p": 0.7, "repeat_last_n": 33, "num_keep": 5, "penalize_newline": True, "numa": False}
    reply, _ = await post(client, OLLAMA, options=options, stream=False)
    assert reply.status == 200
    assert reply.headers["X-NPU-Node-Ignored"] == ", ".join(sorted(f"options.{name}" for name in options))


@pytest.mark.parametrize("path", [CHAT, OLLAMA, "/v1/embeddings", "/api/embed", "/embeddings", "/v1/rerank"])
async def test_a_required_device_in_a_body_is_refused_and_never_ignored(client, path):
    body = {"require_device": "NPU", "query": "a", "documents": ["a"], "messages": TURNS, "input": "a"}
    if path == "/embeddings":
        body = {"require_device": "NPU", "texts": ["a"]}
    reply, error = await post(client, path, **body)
    assert reply.status == 400
    assert "require_device" in str(error)


async def test_a_priority_above_0_is_batch_work(client, engine):
    for priority in (None, -5, 0, 1, 1000):
        await post(client, CHAT, priority=priority)
    assert [job.interactive for job in engine.jobs] == [True, True, True, False, False]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, OLLAMA, "/api/generate"])
async def test_a_wider_context_than_the_models_is_clamped_and_listed(client, engine, path):
    wide = {"num_ctx": 1_000_000}
    fields = {"stream": False, "options": wide} if path.startswith("/api/") else wide
    reply, body = await post(client, path, **fields)
    assert reply.status == 200, body
    assert "num_ctx;limited=" in reply.headers["X-NPU-Node-Ignored"]
    assert len(engine.jobs) == 1


async def test_text_to_tokens_and_back(client, engine):
    reply, body = await post(client, "/tokenize", prompt="Hello <|im_end|>", return_token_strs=True)
    assert reply.status == 200, body
    assert body["tokens"] == engine.tokenizer.encode_prompt("Hello <|im_end|>")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    reply, body = await post(client, "/detokenize", tokens=body["tokens"])
    assert body == {"prompt": "Hello <|im_end|>", "content": "Hello <|im_end|>"}
    # As llama.cpp tells them.
    _, body = await post(client, "/tokenize", content="Hello wörld", with_pieces=True)
    pieces = [one.encode() if isinstance(one := token["piece"], str) else bytes(one) for token in body["tokens"]]
    assert b"".join(pieces).decode() == "Hello wörld"
    _, body = await post(client, "/tokenize", messages=TURNS)
    _, told = await post(client, CHAT)
    assert body["count"] == told["usage"]["prompt_tokens"]
    for wrong in ({}, {"prompt": "x", "messages": TURNS}, {"prompt": "x", "content": "y"}):
        reply, _ = await post(client, "/tokenize", **wrong)
        assert reply.status == 400
    for tokens in ([-1], [10**9], ["x"]):
        reply, _ = await post(client, "/detokenize", tokens=tokens)
        assert reply.status == 400


async def test_truncation_leaves_out_the_oldest_turns_and_keeps_the_instructions(client, engine):
    limit = engine.tokenizer.context_limit
    turn = {"role": "user", "content": "word " * (limit // 8)}
    told = [{"role": "system", "content": "Be brief."}, *[turn] * 12, {"role": "user", "content": "The last."}]
    reply, body = await post(client, "/v1/responses", input=told)
    assert reply.status == 400, body
    reply, body = await post(client, "/v1/responses", input=told, truncation="auto")
    assert reply.status == 200, body
    assert body["truncation"] == "auto"
    assert limit // 2 < body["usage"]["input_tokens"] < limit
    assert "Be brief." in engine.prompt
    assert "The last." in engine.prompt
