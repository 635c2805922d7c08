"""What other servers add to OpenAI's API, on real weights, on the CPU and on the emulated NPU.

Expectations follow from the answer without the extension, cut into tokens by GenAI's own tokenizer.
"""

import json

import aiohttp
import openvino_genai as genai
import pytest

from tests.support.events import sse

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
REQUIRED = "X-NPU-Require-Device"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


# Prompts are prepared before a device is chosen: on the NPU too with --long.
PROMPTS_ON = pytest.mark.parametrize("device", ["CPU", pytest.param("NPU", marks=pytest.mark.long)])


@pytest.fixture(params=["CPU", "NPU"])
def device(request):
    return request.param


@pytest.fixture
def any_node(request, device):
    return request.getfixturevalue("whole_node" if device == "CPU" else "npu_node")


@pytest.fixture
async def http(device):
    """An HTTP client whose requests are answered by the device alone."""
    async with aiohttp.ClientSession(headers={REQUIRED: device}) as session:
        yield session


@pytest.fixture(scope="module")
def tokenizer(store):
    return genai.Tokenizer(str(store.get(MODEL).path))


async def chat(http, node, **fields):
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 40, **fields}
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        told = await reply.json()
        assert reply.status == 200, told
        assert "X-NPU-Node-Ignored" not in reply.headers
        return told["choices"][0]["message"]["content"], told["choices"][0]["finish_reason"], told["usage"]


async def streamed(http, node, **fields):
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 40, "stream": True, **fields}
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        *chunks, _done = await sse(reply)
    parts = [choice for chunk in map(json.loads, chunks) for choice in chunk["choices"]]
    text = "".join(part["delta"].get("content") or "" for part in parts)
    return text, next(part["finish_reason"] for part in parts if part["finish_reason"])


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()


async def test_a_stop_token_ends_the_answer(http, any_node, tokenizer):
    whole, _, _ = await chat(http, any_node)
    tokens = ids(tokenizer, whole)
    stop = tokens[4]
    before = tokenizer.decode(tokens[: tokens.index(stop)])
    # With ignore_eos GenAI itself goes on past a stop token.
    on = {"ignore_eos": True}
    assert (await chat(http, any_node, stop_token_ids=[stop]))[:2] == (before, "stop")
    assert await streamed(http, any_node, stop_token_ids=[stop], **on) == (before, "stop")


async def test_an_answer_has_at_least_min_tokens(http, any_node, tokenizer):
    whole, finish, usage = await chat(http, any_node, max_tokens=60)
    assert finish == "stop"
    least = usage["completion_tokens"] + 10
    longer, _, usage = await chat(http, any_node, max_tokens=least + 1, min_tokens=least)
    assert usage["completion_tokens"] >= least
    assert longer.startswith(whole)
    # Neither a stop sequence nor a stop token ends it before.
    third = ids(tokenizer, whole)[2]
    for stop in ({"stop": [tokenizer.decode([third])]}, {"stop_token_ids": [third]}):
        _, _, usage = await chat(http, any_node, **stop)
        assert usage["completion_tokens"] <= 4
        _, _, usage = await chat(http, any_node, max_tokens=14, min_tokens=12, **stop)
        assert usage["completion_tokens"] >= 12


@PROMPTS_ON
async def test_an_answer_may_continue_the_last_message(http, any_node, tokenizer):
    begun = [*ASKED, {"role": "assistant", "content": "The capital of"}]
    told, _, usage = await chat(http, any_node, messages=begun, continue_final_message=True, max_tokens=4)
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True) + "The capital of"
    assert usage["prompt_tokens"] == len(ids(tokenizer, prompt))
    async with http.post(
        any_node.url + "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4}
    ) as reply:
        expected = (await reply.json())["choices"][0]["text"]
    assert told == expected
