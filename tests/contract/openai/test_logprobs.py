"""Log probabilities of answers: on whole weights, whose tokens are whole characters."""

import json

from tests.contract.openai.test_generation import chat, complete, stream


async def test_logprobs_are_those_of_the_answers_tokens(http, whole_node):
    _, body = await chat(http, whole_node, logprobs=True, top_logprobs=1)
    choice = body["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert all(token["logprob"] <= 0 and bytes(token["bytes"]).decode() == token["token"] for token in tokens)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in tokens)
    _, frames = await stream(http, whole_node, logprobs=True)
    streamed = [json.loads(frame)["choices"][0]["logprobs"] for frame in frames[:-1]]
    flat = [token["token"] for part in streamed if part for token in part["content"]]
    assert flat == [token["token"] for token in tokens]


async def test_logprobs_of_completions(http, whole_node):
    _, body = await complete(http, whole_node, logprobs=1, max_tokens=4)
    choice = body["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == 4


async def test_token_ids_are_those_of_the_answer(http, whole_node):
    _, body = await complete(http, whole_node, max_tokens=6, ignore_eos=True, return_token_ids=True)
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"] == 6
    async with http.post(f"{whole_node.url}/detokenize", json={"tokens": choice["token_ids"]}) as reply:
        assert (await reply.json())["prompt"] == choice["text"]
    _, body = await chat(http, whole_node, max_tokens=4, return_token_ids=True, n=2)
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [4, 4]
    _, body = await complete(http, whole_node, max_tokens=2)
    assert "token_ids" not in body["choices"][0]


async def test_token_ids_are_of_whole_replies_only(http, whole_node):
    reply, body = await complete(http, whole_node, return_token_ids=True, stream=True)
    assert (reply.status, body["error"]["param"]) == (400, "return_token_ids")
