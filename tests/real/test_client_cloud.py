"""A real node as the cloud of a client, through the stock OpenAI SDK: usage, cost and cap are exact to the token."""

import numpy as np
import pytest

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient

pytestmark = pytest.mark.real

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
PROMPT = "What is the capital of France?"
MOST = 24


@pytest.fixture
async def local(node):
    """What the node answers when asked as a node: a vector and an answer."""
    async with NPUClient([node.url]) as client:
        return await client.embed_result("a text"), await client.generate(PROMPT, max_new_tokens=MOST)


@pytest.fixture
def client_with(node, local):
    """Makes a client whose nodes are dead and whose cloud, at one millionth a token, is the node."""

    def make(**cloud):
        settings = CloudSettings(
            base_url=node.url + "/v1",
            api_key="unused",
            chat_model=WRITER,
            embedding_models={local[0].space: EMBEDDER},
            prices={WRITER: {"input": 1, "output": 1}, EMBEDDER: {"input": 1}},
            **cloud,
        )
        dead = NPUClient(["http://127.0.0.1:1"], spaces={EMBEDDER: local[0].space})
        return InferenceClient(dead, CloudClient(settings))

    return make


async def test_answers_are_those_of_the_node_and_the_ledger_holds_what_it_counted(client_with, local):
    expected, answer = local
    async with client_with() as client:
        result = await client.embed_result("a text")
        assert (result.source, result.space) == ("cloud", expected.space)
        assert float(np.dot(result.vector, expected.vector)) > 0.9999
        assert client.ledger.cloud.prompt_tokens == expected.usage.prompt_tokens
        whole = await client.generate(PROMPT, max_new_tokens=MOST)
        stream = client.stream(PROMPT, max_new_tokens=MOST)
        text = "".join([piece async for piece in stream])
        assert whole.text == text == answer.text
        assert whole.usage == stream.result.usage == answer.usage
        tally = client.ledger.cloud
        tokens = expected.usage.prompt_tokens + 2 * total(answer.usage)
        assert tally.prompt_tokens + tally.completion_tokens == tokens
        assert tally.cost * 1_000_000 == tokens


def total(usage):
    return usage.prompt_tokens + usage.completion_tokens
