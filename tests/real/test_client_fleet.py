"""Real nodes under load: of three one killed, one frozen, one slow; one is started again, and one stopped in order."""

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
    """A real node behind a proxy, so that it keeps its address over restarts."""

    def __init__(self, stack, node):
        self.node, self.proxy = node, FaultProxy(node.url)
        self._stack = stack

    async def kill(self):
        """As kill −9 of the process, or a host that loses its power: connections break, new ones are refused."""
        self.node.process.kill()
        await self.proxy.stop()

    async def start(self):
        self.node = await asyncio.to_thread(self._stack.enter_context, start_node(**NODE))
        self.proxy.port = int(self.node.url.rpartition(":")[2])
        if not self.proxy.listening:
            await self.proxy.listen()


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


@contextlib.asynccontextmanager
async def loaded_fleet(shared):
    """Two real nodes and a shared one, a client that knows them, and load on it that has run for a while."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [stack.enter_context(start_node(ready=False, **NODE)) for _ in range(2)]
        for node in nodes:
            await asyncio.to_thread(node.wait_for, lambda body: body["status"] == "ready")
        members = [Member(stack, node) for node in (*nodes, shared)]
        for member in members:
            await stack.enter_async_context(member.proxy.running())
        client = await stack.enter_async_context(NPUClient([member.proxy.url for member in members]))
        await client.health()
        load = Load(client)
        await load.more(20)
        yield members, client, load
        await load.end()


async def test_no_call_fails_while_one_is_killed_one_frozen_and_one_slow_and_while_they_are_restarted(node, long):
    # More than 5 s: three nodes start (five with --long), and probes have to find out what has failed.
    async with loaded_fleet(node) as (members, client, load):
        dead, frozen, slow = members
        slow.proxy.fault = Fault(latency=0.1)
        await dead.kill()
        frozen.node.process.send_signal(signal.SIGSTOP)
        try:
            await load.until(lambda: [node.url for node in client.status() if node.usable] == [slow.proxy.url])
            await load.more(40)
            # A retry for each tenth call and each second, and the two that a client begins with.
            retries = sum(sum(attempt.sent for attempt in result.attempts) - 1 for result in load.results)
            assert retries <= 2 + 0.1 * len(load.results) + time.monotonic() - load.began
        finally:
            frozen.node.process.send_signal(signal.SIGCONT)
        await load.served_by(frozen)
        await dead.start()
        await load.served_by(dead)

        slow.proxy.fault = Fault()
        for member in (dead, frozen) if long else (frozen,):
            assert await asyncio.to_thread(member.node.terminate) == 0
            await load.more(20)
            if long:
                await member.start()
                await load.served_by(member)
