"""POST /v1/completions and /v1/chat/completions: framing, parameters, usage, errors."""

import json

from tests.support.events import sse

MODEL = "smollm2-135m-instruct"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


async def chat(http, node, **body):
    body = {"model": MODEL, "messages": CAPITAL, "max_tokens": 8, **body}
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        return reply, await reply.json()


async def complete(http, node, **body):
    body = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, **body}
    async with http.post(node.url + "/v1/completions", json=body) as reply:
        return reply, await reply.json()


async def stream(http, node, route="chat/completions", **body):
    body = {"model": MODEL, "max_tokens": 8, "stream": True, **body}
    if route == "completions":
        body.setdefault("prompt", "One, two, three,")
    else:
        body.setdefault("messages", CAPITAL)
    async with http.post(f"{node.url}/v1/{route}", json=body) as reply:
        assert reply.status == 200
        return reply, await sse(reply)


async def test_text_parts_are_one_text_and_developer_is_system(http, node):
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    _, whole = await chat(http, node, messages=[{"role": "system", "content": "Be brief."}, *CAPITAL])
    _, split = await chat(
        http, node, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    )
    assert split["choices"][0] == whole["choices"][0]
    assert split["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


async def test_the_frames_of_a_chat_stream(http, node):
    reply, frames = await stream(http, node, stream_options={"include_usage": True})
    _, whole = await chat(http, node)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    first, *middle, finish, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole["choices"][0]["message"]["content"]
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert all(chunk["usage"] is None for chunk in [first, *middle, finish])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


async def test_prompts_and_choices_are_numbered_by_prompt(http, node):
    prompts = ["One, two, three,", "A, B, C,"]
    _, both = await complete(http, node, prompt=prompts, n=2)
    texts = [choice["text"] for choice in both["choices"]]
    alone = [(await complete(http, node, prompt=prompt))[1]["choices"][0]["text"] for prompt in prompts]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]
    assert both["usage"]["completion_tokens"] == 32
    _, frames = await stream(http, node, "completions", prompt=prompts, n=2)
    streamed = ["", "", "", ""]
    for frame in frames[:-1]:
        choice = json.loads(frame)["choices"][0]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_token_ids_continue_as_the_text_does(http, node):
    _, reply = await complete(http, node, prompt=[29], max_tokens=3)
    assert reply["usage"]["prompt_tokens"] == 1
    reply, _ = await complete(http, node, prompt=[10_000_000])
    assert reply.status == 400


async def test_a_seed_repeats_and_choices_differ(http, node):
    wanted = {"temperature": 1.0, "seed": 11, "max_tokens": 16}
    await chat(http, node, **wanted)  # puts the prompt into the prefix cache: docs/other-tools.md
    _, first = await chat(http, node, **wanted)
    _, second = await chat(http, node, **wanted)
    assert first["choices"] == second["choices"]
    _, several = await chat(http, node, n=3, **wanted)
    assert len({choice["message"]["content"] for choice in several["choices"]}) == 3


async def test_models_are_found_by_id_and_alias_and_an_id_may_have_a_slash(http, node):
    async with http.get(node.url + "/v1/models/SmolLM2:latest") as reply:
        assert (await reply.json())["id"] == MODEL
    async with http.get(node.url + "/v1/models/nobody/nothing") as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")
        assert reply.headers["x-should-retry"] == "false"


async def test_usage_tells_how_much_of_a_prompt_the_prefix_cache_held(http, node):
    prompt = "The bells of the old harbour rang in the fog, and nobody counted them. " * 12
    _, first = await complete(http, node, prompt=prompt, n=2)
    _, again = await complete(http, node, prompt=prompt)
    _, other = await complete(http, node, prompt=["Another tale. " * 30, prompt])
    _, frames = await stream(http, node, "completions", prompt=prompt, stream_options={"include_usage": True})
    tokens = again["usage"]["prompt_tokens"]
    held = {"cached_tokens": tokens // 32 * 32}
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "the first of two choices is computed"
    assert again["usage"]["prompt_tokens_details"] == held
    assert other["usage"]["prompt_tokens_details"] == held
    assert json.loads(frames[-2])["usage"]["prompt_tokens_details"] == held
    async with http.post(node.url + "/v1/responses", json={"model": MODEL, "input": prompt}) as reply:
        assert (await reply.json())["usage"]["input_tokens_details"]["cached_tokens"] == 0
