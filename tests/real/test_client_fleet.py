"""Real nodes under load: of three one loses its host, one is frozen and then stopped, one is slow."""

import asyncio
import contextlib
import signal
import time

import pytest

from backend_client import NPUClient
from tests.faults.proxy import Fault, FaultProxy
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
CALLERS = 4
PAUSE_S = 0.2
TIMEOUT_S = 20
# Without its cache, so that every call is work.
NODE = {"NPU_NODE_MODELS": '[{"name": "all-minilm-l6-v2", "streams": 1}]', "NPU_NODE_EMBEDDING_CACHE": "0"}


class Member:
    """A node behind a proxy, so that it keeps its address over restarts; two may be the same node to the network."""

    def __init__(self, node):
        self.node, self.proxy = node, FaultProxy(node.url)

    async def start(self, stack):
        self.node = await asyncio.to_thread(stack.enter_context, start_node(**NODE))
        self.proxy.port = int(self.node.url.rpartition(":")[2])


class Load:
    """Callers who embed again and again, and whose every call must be answered in time."""

    def __init__(self, client):
        self.results = []
        self.began = time.monotonic()
        self._client = client
        self._callers = [asyncio.create_task(self._call(number)) for number in range(CALLERS)]

    async def _call(self, number):
        while True:
            async with asyncio.timeout(TIMEOUT_S + 1):
                text = f"caller {number}, text {len(self.results)}"
                self.results.append(await self._client.embed_result(text, timeout=TIMEOUT_S))
            await asyncio.sleep(PAUSE_S)

    async def until(self, condition):
        while not condition():
            if ended := [caller for caller in self._callers if caller.done()]:
                await asyncio.gather(*ended)  # raises what ended it
            await asyncio.sleep(0.02)

    async def more(self, count):
        goal = len(self.results) + count
        await self.until(lambda: len(self.results) >= goal)

    async def served_by(self, member):
        since = len(self.results)
        await self.until(lambda: any(result.node == member.proxy.url for result in self.results[since:]))

    async def end(self):
        for caller in self._callers:
            caller.cancel()
        failures = await asyncio.gather(*self._callers, return_exceptions=True)
        assert not [failure for failure in failures if not isinstance(failure, asyncio.CancelledError)]


async def test_no_call_fails_while_one_is_down_one_frozen_and_one_slow_and_while_one_is_stopped(node, long):
    # More than 5 s: a node starts (three times with --long), and probes have to find out what has failed.
    async with contextlib.AsyncExitStack() as stack:
        own = await asyncio.to_thread(stack.enter_context, start_node(**NODE))
        members = down, frozen, slow = Member(node), Member(own), Member(node)
        for member in members:
            await stack.enter_async_context(member.proxy.running())
        client = await stack.enter_async_context(NPUClient([member.proxy.url for member in members]))
        await client.health()
        load = Load(client)
        await load.more(20)

        slow.proxy.fault = Fault(latency=0.1)
        # As a host that loses its power: connections break, new ones are refused.
        await down.proxy.stop()
        own.process.send_signal(signal.SIGSTOP)
        try:
            await load.until(lambda: [node.url for node in client.status() if node.usable] == [slow.proxy.url])
            await load.more(40)
            # A retry for each tenth call and each second, and the two that a client begins with.
            retries = sum(sum(attempt.sent for attempt in result.attempts) - 1 for result in load.results)
            assert retries <= 2 + 0.1 * len(load.results) + time.monotonic() - load.began
        finally:
            own.process.send_signal(signal.SIGCONT)
        await load.served_by(frozen)
        await down.proxy.listen()
        await load.served_by(down)

        slow.proxy.fault = Fault()
        assert await asyncio.to_thread(own.terminate) == 0
        await load.more(20)
        if long:
            await frozen.start(stack)
            await load.served_by(frozen)
            frozen.node.process.kill()
            await load.more(20)
            await frozen.start(stack)
            await load.served_by(frozen)
        await load.end()
