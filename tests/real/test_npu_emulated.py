"""The NPU's own code path on real weights, executed by the CPU: same shapes, same limits, same refusals.

The limits of `npu_node` are small so that loading is quick; what is compiled is kept between runs of the suite.
"""

import asyncio
import json

import numpy as np
import openvino as ov
import pytest

from tests.real.inference import REFERENCE, ask, post, stream, worst_cosine

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LONG = "Tell me about the sea. " * 30
PARIS = {"prompt": "What is the capital of France?"}
NPU_ONLY = {"X-NPU-Require-Device": "NPU"}


@pytest.mark.parametrize(
    ("question", "answer", "to_the_end"),
    [
        (PARIS["prompt"], "Paris", True),
        ("How many days are in a week?", "7", True),
        ("What is the chemical symbol of water?", "H2O", True),
        ("What is the opposite of hot?", "cold", False),
    ],
)
async def test_simple_questions_have_the_same_greedy_answer_as_on_the_cpu(
    npu_node, whole_node, http, question, answer, to_the_end
):
    """Word for word, but for the last one: after "cold." one engine ends and the other goes on.

    The engines compute the same weights in different shapes and orders, and a greedy choice between two tokens that are
    all but equally likely falls as the rounding does.
    """
    asked = {"prompt": question, "max_new_tokens": 12}
    _, on_npu = await ask(http, npu_node, asked, NPU_ONLY)
    _, on_cpu = await ask(http, whole_node, asked)
    assert (on_npu["device"], on_cpu["device"]) == ("NPU", "CPU")
    assert answer in on_npu["text"]
    assert answer in on_cpu["text"]
    if to_the_end:
        assert on_npu["text"] == on_cpu["text"]
        assert on_npu["finish_reason"] == on_cpu["finish_reason"] == "stop"
    else:
        shorter, longer = sorted((on_npu["text"], on_cpu["text"]), key=len)
        assert longer.startswith(shorter)


async def test_an_answer_of_the_npu_says_where_it_comes_from(npu_node, whole_node, http):
    headers, answer = await ask(http, npu_node, PARIS)
    assert "Paris" in answer["text"]
    assert (answer["device"], answer["emulated"], answer["finish_reason"]) == ("NPU", True, "stop")
    assert (headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"]) == ("NPU", "preferred")
    assert headers["X-NPU-Emulated"] == "true"
    assert int(headers["X-NPU-Busy-Delta-Us"]) == answer["npu_busy_delta_us"] > 0
    assert answer["usage"]["prompt_tokens"] == 37
    _, on_cpu = await ask(http, whole_node, PARIS)
    assert "emulated" not in on_cpu


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference", {**PARIS, "max_new_tokens": 1, "stream": True}),
        ("/embeddings", {"texts": ["a"]}),
        ("/v1/embeddings", {"model": "all-minilm-l6-v2", "input": "a"}),
    ],
)
async def test_every_reply_says_that_the_npu_is_emulated(npu_node, http, path, body):
    status, headers, content = await post(http, npu_node, path, body)
    assert status == 200, content
    assert headers["X-NPU-Emulated"] == "true"
    assert headers["X-NPU-Node-Device"] == "NPU"


def test_health_says_that_the_npu_is_emulated_what_was_proven_and_what_is_ignored(npu_node):
    _, body = npu_node.health()
    npu = body["devices"][0]
    assert (npu["name"], npu["available"], npu["emulated"]) == ("NPU", True, True)
    assert body["npu"]["emulated"] is True
    assert body["npu"]["busy_time_us"] > 0
    assert body["npu"]["memory_bytes"] is None
    assert body["npu"]["reasons"]["memory_bytes"] == "the NPU is emulated"
    minilm, smollm = body["models"]
    for model in (minilm, smollm):
        on_npu, on_cpu = model["engines"]
        assert (on_npu["state"], on_npu["emulated"], on_cpu["emulated"]) == ("ready", True, False)
        assert on_npu["canary"]["device"] == npu["full_name"]
        assert on_npu["canary"]["openvino"] == ov.get_version()
    assert smollm["engines"][0]["notes"] == ["cache_size_gb is ignored: the engine for NPU has no use for it"]
    assert (smollm["engines"][0]["prompt_limit"], smollm["engines"][0]["total_limit"]) == (64, 128)


async def test_a_prompt_over_the_limit_goes_to_the_cpu_or_is_refused_with_the_numbers(npu_node, http):
    headers, answer = await ask(http, npu_node, {"prompt": LONG, "max_new_tokens": 2})
    assert (answer["device"], headers["X-NPU-Node-Route-Reason"]) == ("CPU", "context_exceeds_npu")
    assert "X-NPU-Emulated" not in headers
    assert "X-NPU-Busy-Delta-Us" not in headers
    assert answer["npu_busy_delta_us"] is None
    for body, room in (({"prompt": LONG}, "1"), (PARIS, "170")):
        required = {**NPU_ONLY, "X-NPU-Min-New-Tokens": room}
        status, _, content = await post(http, npu_node, "/inference", body, required)
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "64 in the prompt and 128 in all" in error["message"]


async def test_only_the_prompt_decides_where_a_request_runs_and_the_window_ends_it_with_length(npu_node, http):
    endless = {"prompt": "Tell me about the sea. " * 9, "raw": True, "ignore_eos": True, "max_new_tokens": 155}
    headers, answer = await ask(http, npu_node, endless)
    assert (answer["device"], headers["X-NPU-Node-Route-Reason"]) == ("NPU", "preferred")
    assert answer["finish_reason"] == "length"
    assert 50 < answer["usage"]["prompt_tokens"] <= 64
    assert answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] == 64 + 64


async def test_what_the_npu_cannot_do_goes_to_the_cpu_or_is_refused(npu_node, http):
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for wanted, param in (({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"best_of": 2}, "best_of")):
        status, headers, _ = await post(http, npu_node, "/v1/chat/completions", {**chat, **wanted})
        assert status == 200
        assert (headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"]) == ("CPU", "unsupported_on_npu")
        status, _, content = await post(http, npu_node, "/v1/chat/completions", {**chat, **wanted}, NPU_ONLY)
        assert (status, json.loads(content)["error"]["param"]) == (400, param)


async def test_an_answer_over_the_models_limit_is_refused_everywhere(npu_node, http):
    for headers in (NPU_ONLY, None):
        status, _, content = await post(http, npu_node, "/inference", {**PARIS, "max_new_tokens": 161}, headers)
        error = json.loads(content)["error"]
        assert (status, error["param"]) == (400, "max_new_tokens")
        assert "at most 160" in error["message"]


async def test_a_caller_that_leaves_frees_the_device_within_a_token(npu_node, http):
    wanted = 150
    long_one = {"prompt": "Count.", "max_new_tokens": wanted, "ignore_eos": True}
    shares = []
    # Again where a busy machine ran the edge process late, or not the engine: that time counts as busy, too.
    while len(shares) < 5 and not any(share < 10 for share in shares):
        busy = npu_node.health()[1]["npu"]["busy_time_us"]
        tokens = []
        await stream(http, npu_node, long_one, lambda name, data: tokens.append((name, data)) or len(tokens) < 2)  # noqa: B023
        # The node hears of it when it next reads the connection.
        await asyncio.to_thread(npu_node.wait_for, lambda body: body["models"][1]["in_flight"] == 0)
        _, after = await ask(http, npu_node, {**PARIS, "max_new_tokens": 2})
        shares.append((npu_node.health()[1]["npu"]["busy_time_us"] - busy) / after["npu_busy_delta_us"])
    # Four tokens and two prefills are all that the device did: as much as two short answers, not as 150 tokens.
    assert min(shares) < 10
    assert npu_node.health()[1]["models"][1]["in_flight"] == 0


async def test_a_stop_sequence_ends_the_generation_with_its_busy_time(npu_node, http):
    _, answer = await ask(http, npu_node, {**PARIS, "stop": ["capital"]})
    assert (answer["text"], answer["finish_reason"]) == ("The ", "stop")
    assert answer["npu_busy_delta_us"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARIS["prompt"]}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream_options": {"include_usage": True}}),
        ("/v1/responses", {"input": PARIS["prompt"], "max_output_tokens": 2}),
        ("/api/chat", {"messages": [{"role": "user", "content": PARIS["prompt"]}], "options": {"num_predict": 2}}),
    ],
)
async def test_a_stream_of_any_dialect_ends_with_the_busy_time(npu_node, http, path, body):
    body = {"model": "smollm2-135m-instruct", "stream": True, **body}
    status, headers, content = await post(http, npu_node, path, body)
    assert (status, headers["X-NPU-Node-Device"], headers["X-NPU-Emulated"]) == (200, "NPU", "true")
    lines = (line.removeprefix("data: ") for line in content.decode().splitlines())
    *others, last = (json.loads(line) for line in lines if line.startswith("{"))
    assert last.get("response", last)["npu_busy_delta_us"] > 0
    # With usage also where the answer ends: the gateway takes a usage that it asked for out of the stream.
    assert [other for other in others if "npu_busy_delta_us" in other] == (
        others[-1:] if "stream_options" in body else []
    )


async def test_vectors_from_static_buckets_are_the_other_librarys(npu_node, http):
    body = {"texts": REFERENCE["texts"], "truncate": True}
    headers, reply = await ask(http, npu_node, body, NPU_ONLY, path="/embeddings")
    assert headers["X-NPU-Node-Route-Reason"] == "device_required"
    assert worst_cosine(np.asarray(reply["embeddings"])) >= 0.999
    assert reply["npu_busy_delta_us"] > 0


async def test_texts_whose_runs_overlap_have_the_same_vectors_and_are_each_proven(npu_node, http):
    texts = [f"text {number} of several" + " and more" * (number % 3 * 20) for number in range(12)]

    async def embed(text):
        headers, reply = await ask(http, npu_node, {"texts": [text]}, NPU_ONLY, path="/embeddings")
        assert "X-NPU-Proven" not in headers
        return reply["embeddings"], reply["npu_busy_delta_us"]

    one_by_one = [await embed(text) for text in texts]
    before = npu_node.health()[1]["npu"]["busy_time_us"]
    at_once = await asyncio.gather(*map(embed, texts))
    used = npu_node.health()[1]["npu"]["busy_time_us"] - before
    assert [vectors for vectors, _ in at_once] == [vectors for vectors, _ in one_by_one]
    claimed = [us for _, us in at_once]
    assert min(claimed) > 0
    assert sum(claimed) <= used


async def test_an_emulated_npu_has_no_energy_counter_and_says_so(npu_node, http):
    _, body = await ask(http, npu_node, {"texts": ["no counter"]}, path="/embeddings")
    assert (body["joules"], body["joules_reason"]) == (None, "the NPU is emulated")
    _, health = npu_node.health()
    assert (health["npu"]["energy_uj"], health["npu"]["reasons"]["energy_uj"]) == (None, "the NPU is emulated")
