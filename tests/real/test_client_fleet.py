"""Three real nodes: one killed, one frozen, one slow, then all restarted in turn, under load."""

import contextlib

import numpy as np
import psutil
import pytest

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient
from tests.support.fleet import Load, real_fleet

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

RATE = 40
TIMEOUT_S = 20


@contextlib.asynccontextmanager
async def loaded_fleet():
    """Three real nodes, a client that knows them, and load on it that has run for a while."""
    async with real_fleet(3) as nodes, NPUClient([node.url for node in nodes]) as client:
        await client.health()
        load = Load(client, rate=RATE, timeout=TIMEOUT_S)
        await load.more(3 * RATE)
        assert not load.errors
        yield nodes, client, load
        await load.drained()
        # Each call ended in time and was answered, whatever happened meanwhile.
        assert not load.errors
        assert max(record.seconds for record in load.records) <= TIMEOUT_S + 1


async def test_one_killed_one_frozen_one_slow():
    async with loaded_fleet() as ((dead, frozen, slow), client, load):
        slow.slow(0.1)
        await dead.kill()
        frozen.freeze()
        while [node.url for node in client.status() if node.usable] != [slow.url]:
            await load.more(1)
        await load.more(2 * RATE)
        # A retry for each tenth call and each second, and the two that a client begins with.
        assert load.retries <= 2 + 0.1 * len(load.records) + load.seconds
        frozen.thaw()
        await load.served_by(frozen)
        await dead.start()
        await load.served_by(dead)


async def test_a_rolling_restart_of_all_fails_no_call():
    async with loaded_fleet() as (nodes, _, load):
        for node in nodes:
            assert await node.terminate() == 0
            await load.more(RATE)
            await node.start()
            await load.served_by(node)


async def test_a_node_is_the_cloud_of_another_through_the_stock_openai_client(node):
    """The OpenAI SDK against a real node: the ledger holds exactly what the node counted, vectors are in one space."""
    async with NPUClient([node.url]) as local:
        expected = await local.embed_result("a text")
        answer = await local.generate("What is the capital of France?", max_new_tokens=24)
    settings = CloudSettings(
        base_url=node.url + "/v1",
        api_key="unused",
        chat_model="smollm2-135m-instruct",
        embedding_models={expected.space: "all-minilm-l6-v2"},
        prices={"smollm2-135m-instruct": {"input": 1, "output": 1}, "all-minilm-l6-v2": {"input": 1}},
    )
    dead = NPUClient(["http://127.0.0.1:1"], spaces={"all-minilm-l6-v2": expected.space})
    async with InferenceClient(dead, CloudClient(settings)) as client:
        result = await client.embed_result("a text")
        assert (result.source, result.space) == ("cloud", expected.space)
        assert float(np.dot(result.vector, expected.vector)) > 0.9999
        assert client.ledger.cloud.prompt_tokens == expected.usage.prompt_tokens
        whole = await client.generate("What is the capital of France?", max_new_tokens=24)
        stream = client.stream("What is the capital of France?", max_new_tokens=24)
        text = "".join([piece async for piece in stream])
        assert whole.text == text == answer.text
        assert whole.usage == stream.result.usage == answer.usage
        tally = client.ledger.cloud
        tokens = expected.usage.prompt_tokens + 2 * (answer.usage.prompt_tokens + answer.usage.completion_tokens)
        assert tally.prompt_tokens + tally.completion_tokens == tokens
        assert tally.cost * 1_000_000 == tokens
    assert psutil.Process(node.process.pid).is_running()
