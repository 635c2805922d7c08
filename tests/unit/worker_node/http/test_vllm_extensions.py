"""What vLLM adds to OpenAI's API, where it meets streams, several choices and each other. The engine is scripted."""

import json

import numpy as np
import pytest

from tests.support.events import sse
from tests.support.writing import WRITER, writing

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "Hello"}]


async def post(client, path, **body):
    async with client.post(path, json={"model": WRITER, **body}) as reply:
        return reply, await reply.json()


async def stream(client, path, **body):
    async with client.post(path, json={"model": WRITER, "stream": True, **body}) as reply:
        assert reply.status == 200, await reply.text()
        *chunks, _done = await sse(reply)
        return [json.loads(chunk) for chunk in chunks]


@pytest.mark.parametrize("n", [1, 3])
async def test_every_chunk_tells_the_usage_so_far(store, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with writing(store) as (client, _, engine):
        *chunks, last = await stream(client, CHAT, messages=TURNS, n=n, stream_options=options)
        whole = len(engine.tokenizer.encode_prompt(engine.text))
    for index in range(n):
        mine = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in mine] == [0, *range(1, whole + 1), whole]
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in mine)
    assert last["usage"]["completion_tokens"] == n * whole


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_sends_the_prompt_before_each_choice(store, n):
    async with writing(store) as (client, _, engine):
        ids = engine.tokenizer.encode_prompt("Count")
        for prompt in ("Count", [ids]):
            _, body = await post(client, COMPLETIONS, prompt=prompt, echo=True, n=n)
            assert [choice["text"] for choice in body["choices"]] == ["Count" + engine.text] * n
            chunks = await stream(client, COMPLETIONS, prompt=prompt, echo=True, n=n)
            texts = [""] * n
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert texts == ["Count" + engine.text] * n
        reply, body = await post(client, COMPLETIONS, prompt="Count", echo=True, logprobs=1)
        assert (reply.status, body["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(("temperature", "shown"), [(0, 1), (1, 0)])
async def test_more_logprobs_than_there_are_is_what_there_is(store, temperature, shown):
    async with writing(store) as (client, *_):
        reply, body = await post(client, CHAT, messages=TURNS, logprobs=True, top_logprobs=5, temperature=temperature)
        assert reply.status == 200, body
        assert reply.headers["X-NPU-Node-Ignored"] == f"top_logprobs;limited={shown}"
        assert {len(token["top_logprobs"]) for token in body["choices"][0]["logprobs"]["content"]} == {shown}
        fields = {"logprobs": True, "top_logprobs": shown, "temperature": temperature}
        reply, _ = await post(client, CHAT, messages=TURNS, **fields)
        assert "X-NPU-Node-Ignored" not in reply.headers


async def test_a_priority_above_0_is_batch_work(store):
    async with writing(store) as (client, _, engine):
        for priority in (None, -5, 0, 1, 1000):
            await post(client, CHAT, messages=TURNS, priority=priority)
    assert [job.interactive for job in engine.jobs] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 9, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "content": " "}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [[[[[1]]]]]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 10_000}}, "chat_template_kwargs"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
)
async def test_what_cannot_be_is_refused_before_the_engine(store, fields, param):
    async with writing(store) as (client, _, engine):
        reply, body = await post(client, CHAT, **{"messages": TURNS, **fields})
        assert (reply.status, body["error"]["param"]) == (400, param), body
    assert engine.jobs == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": TURNS, "num_ctx": 1_000_000}),
        (COMPLETIONS, {"prompt": "Hello", "num_ctx": 1_000_000}),
        ("/api/chat", {"messages": TURNS, "stream": False, "options": {"num_ctx": 1_000_000}}),
        ("/api/generate", {"prompt": "Hello", "stream": False, "options": {"num_ctx": 1_000_000}}),
    ],
)
async def test_a_wider_context_than_the_models_is_clamped_and_listed(store, path, fields):
    async with writing(store) as (client, _, engine):
        reply, body = await post(client, path, **fields)
        assert reply.status == 200, body
        assert "num_ctx;limited=" in reply.headers["X-NPU-Node-Ignored"]
        assert len(engine.jobs) == 1


async def test_text_to_tokens_and_back(store):
    async with writing(store) as (client, _, engine):
        reply, body = await post(client, "/tokenize", prompt="Hello <|im_end|>", return_token_strs=True)
        assert reply.status == 200, body
        assert body["tokens"] == engine.tokenizer.encode_prompt("Hello <|im_end|>")
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        reply, body = await post(client, "/detokenize", tokens=body["tokens"])
        assert body == {"prompt": "Hello <|im_end|>", "content": "Hello <|im_end|>"}
        _, body = await post(client, "/tokenize", messages=TURNS)
        _, told = await post(client, CHAT, messages=TURNS)
        assert body["count"] == told["usage"]["prompt_tokens"]
        for wrong in ({}, {"prompt": "x", "messages": TURNS}):
            reply, _ = await post(client, "/tokenize", **wrong)
            assert reply.status == 400
        for tokens in ([-1], [10**9], ["x"]):
            reply, _ = await post(client, "/detokenize", tokens=tokens)
            assert reply.status == 400


async def test_truncation_leaves_out_the_oldest_turns_and_keeps_the_instructions(store):
    async with writing(store) as (client, _, engine):
        limit = engine.tokenizer.context_limit
        turn = {"role": "user", "content": "word " * (limit // 8)}
        told = [{"role": "system", "content": "Be brief."}, *[turn] * 12, {"role": "user", "content": "The last."}]
        reply, body = await post(client, "/v1/responses", input=told)
        assert reply.status == 400, body
        reply, body = await post(client, "/v1/responses", input=told, truncation="auto")
        assert reply.status == 200, body
        assert body["truncation"] == "auto"
        assert limit // 2 < body["usage"]["input_tokens"] < limit
        prompt = engine.tokenizer.decode(np.frombuffer(engine.jobs[-1].tokens, "<i4").tolist())
    assert "Be brief." in prompt
    assert "The last." in prompt
