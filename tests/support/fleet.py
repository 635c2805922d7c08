"""Several real nodes that keep their addresses over restarts, and a load that tells what became of each call."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from dataclasses import dataclass

from backend_client import NPUUnavailableError
from tests.faults.proxy import Fault, FaultProxy
from tests.support.nodes import start_node

# Without its cache, so that every call is work.
_NODE = {"NPU_NODE_MODELS": '[{"name": "all-minilm-l6-v2", "streams": 1}]', "NPU_NODE_EMBEDDING_CACHE": "0"}


def _start(**options):
    return start_node("--log-level", "warning", **options, **_NODE)


class Member:
    """A real node behind a proxy; `url` is where clients find it."""

    def __init__(self, stack, node):
        self._stack = stack
        self._node = node
        self._proxy = FaultProxy(node.url)

    @property
    def url(self):
        return self._proxy.url

    @property
    def requests(self):
        """How many requests other than probes came for it."""
        return self._proxy.requests

    def running(self):
        return self._proxy.running()

    async def kill(self):
        """As kill −9 of the process, or a host that loses its power: connections break, new ones are refused."""
        self._node.process.kill()
        await self._proxy.stop()

    def freeze(self):
        """SIGSTOP: connections stay, nothing answers."""
        self._node.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        """Let it go on, if it is there."""
        self._node.process.send_signal(signal.SIGCONT)

    def slow(self, seconds):
        """Every reply comes so much later; 0 ends it."""
        self._proxy.fault = Fault(latency=seconds)

    async def terminate(self):
        """Ask it to drain and end; returns its exit status."""
        return await asyncio.to_thread(self._node.terminate)

    async def start(self):
        """A fresh node at the same address, ready when this returns."""
        self._node = await asyncio.to_thread(self._stack.enter_context, _start())
        self._proxy.port = int(self._node.url.rpartition(":")[2])
        if not self._proxy.listening:
            await self._proxy.listen()


@contextlib.asynccontextmanager
async def real_fleet(count):
    """That many nodes that embed."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(_start(ready=False)) for _ in range(count)]
        for node in nodes:
            await asyncio.to_thread(node.wait_for, lambda body: body["status"] == "ready")
        async with contextlib.AsyncExitStack() as proxies:
            members = [Member(stack, node) for node in nodes]
            for member in members:
                await proxies.enter_async_context(member.running())
            try:
                yield members
            finally:
                for member in members:
                    member.thaw()


@dataclass(frozen=True)
class CallRecord:
    """One call: when it was due and how long it took, in seconds; how many requests nodes may have seen of it; `error`
    is None for an answer.
    """

    due: float
    seconds: float
    sent: int
    node: str | None
    error: NPUUnavailableError | None


class Load:
    """Embeds `rate` texts a second, come what may: a call that takes long delays none of those after it."""

    def __init__(self, client, *, rate, timeout):
        self.records = []
        self._client = client
        self._rate = rate
        self._timeout = timeout
        self._calls = set()
        self._began = time.monotonic()
        self._ticker = asyncio.create_task(self._tick())

    @property
    def seconds(self):
        """For how long it has been on."""
        return time.monotonic() - self._began

    @property
    def errors(self):
        return [record.error for record in self.records if record.error is not None]

    @property
    def answers(self):
        return len(self.records) - len(self.errors)

    @property
    def retries(self):
        """Requests beyond the first of a call."""
        return sum(max(0, record.sent - 1) for record in self.records)

    @property
    def served(self):
        """Answers by node."""
        return Counter(record.node for record in self.records if record.node is not None)

    async def more(self, answers):
        """Wait for that many answers more."""
        goal = self.answers + answers
        while self.answers < goal:
            await asyncio.sleep(0.02)

    async def served_by(self, member):
        """Wait for an answer of this node that comes after now."""
        before = self.served[member.url]
        while self.served[member.url] == before:
            await asyncio.sleep(0.02)

    async def drained(self):
        """Begin no call any more, and wait for those under way."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await asyncio.gather(*self._calls)

    async def _tick(self):
        number = 0
        while True:
            due = self._began + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            call = asyncio.create_task(self._call(number, due))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            number += 1

    async def _call(self, number, due):
        node = error = None
        try:
            result = await self._client.embed_result(f"text number {number}", timeout=self._timeout)
            node, attempts = result.node, result.attempts
        except NPUUnavailableError as failure:
            error, attempts = failure, failure.attempts
        sent = sum(attempt.sent for attempt in attempts)
        self.records.append(CallRecord(due, time.monotonic() - due, sent, node, error))
