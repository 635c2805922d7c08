"""Three real nodes: one killed, one frozen, one slow, then all restarted in turn, under load."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import psutil
import pytest

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient, NPUUnavailableError
from tests.faults.proxy import Fault, FaultProxy
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

EMBEDDING_ONLY = {"NPU_NODE_MODELS": '[{"name": "all-minilm-l6-v2", "streams": 1}]'}


@contextlib.asynccontextmanager
async def real_nodes(count):
    """That many nodes, each behind a proxy that keeps its address over restarts."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(start_node(ready=False, **EMBEDDING_ONLY)) for _ in range(count)]
        for node in nodes:
            await asyncio.to_thread(node.wait_for, lambda body: body["status"] == "ready")
        async with contextlib.AsyncExitStack() as proxies:
            yield nodes, [await proxies.enter_async_context(FaultProxy(node.url).running()) for node in nodes]


class Load:
    """Callers that embed again and again; counts answers and errors."""

    def __init__(self, client, callers, timeout):
        self.client = client
        self.timeout = timeout
        self.answers = 0
        self.errors = []
        self.extra = 0
        self.served = {}
        self._tasks = [asyncio.create_task(self._call(index)) for index in range(callers)]

    async def _call(self, caller):
        turn = 0
        while True:
            turn += 1
            try:
                result = await self.client.embed_result(f"caller {caller} turn {turn}", timeout=self.timeout)
            except NPUUnavailableError as error:
                self.errors.append(error)
            else:
                self.answers += 1
                self.extra += len(result.attempts) - 1
                self.served[result.node] = self.served.get(result.node, 0) + 1

    async def more(self, answers):
        """Wait for that many answers more."""
        goal = self.answers + answers
        while self.answers < goal:
            await asyncio.sleep(0.02)

    async def stop(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_one_killed_one_frozen_one_slow():
    async with real_nodes(3) as (nodes, proxies), NPUClient([proxy.url for proxy in proxies]) as client:
        await client.health()
        load = Load(client, callers=6, timeout=20)
        await load.more(100)
        assert not load.errors

        proxies[2].fault = Fault(latency=0.1)
        nodes[0].process.kill()
        await proxies[0].stop()
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        try:
            await load.more(100)
            # Each call ended in time, none failed: the slow node served what the others could not.
            assert not load.errors
            assert load.extra <= 2 + 0.1 * load.answers + 30
            [usable] = [node.url for node in client.status() if node.usable]
            assert usable == proxies[2].url
        finally:
            os.kill(nodes[1].process.pid, signal.SIGCONT)

        before = load.served.get(proxies[1].url, 0)
        while load.served.get(proxies[1].url, 0) == before:
            await load.more(1)
        await load.stop()
        assert not load.errors


async def test_a_rolling_restart_of_all_fails_no_call():
    async with real_nodes(3) as (nodes, proxies), NPUClient([proxy.url for proxy in proxies]) as client:
        await client.health()
        load = Load(client, callers=6, timeout=20)
        with contextlib.ExitStack() as stack:
            for index, proxy in enumerate(proxies):
                await load.more(30)
                assert await asyncio.to_thread(nodes[index].terminate) == 0
                fresh = await asyncio.to_thread(stack.enter_context, start_node(**EMBEDDING_ONLY))
                proxy.port = int(fresh.url.rpartition(":")[2])
                before = load.served.get(proxy.url, 0)
                while load.served.get(proxy.url, 0) == before:
                    await load.more(1)
            await load.stop()
        assert not load.errors
        assert set(load.served) == {proxy.url for proxy in proxies}


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
