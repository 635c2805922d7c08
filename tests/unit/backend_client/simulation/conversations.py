"""Conversations of five turns over a fleet, in virtual time, with the client's affinity and without it."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from backend_client import ClientOptions, NPUClient, NPUError
from backend_client.options import ProbeOptions
from tests.unit.backend_client.simulation.nodes import EMBEDDER, WRITER, SimNode, SimTransport
from tests.unit.backend_client.virtual_time import VirtualLoop

TURNS = 5
FAULTS = ("dead", "cut", "draining", "frozen", "busy", "failing", f"killed {WRITER}")


@dataclass
class Played:
    """What the conversations showed: `nodes` are those that answered each of them, turn by turn, None where none did.

    `overloads` are the requests that came to a node with more under way than the bound allows.
    """

    nodes: list = field(default_factory=list)
    failed: Counter = field(default_factory=Counter)
    overloads: list = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    @property
    def kept(self):
        """The share of the later turns that the node of the turn before answered."""
        pairs = [pair for asked in self.nodes for pair in itertools.pairwise(asked)]
        return sum(one == other for one, other in pairs) / len(pairs)


class ChatTransport(SimTransport):
    """Counts at the nodes what is under way there; a chat takes as long as it says."""

    def __init__(self, nodes, played, seconds):
        super().__init__(nodes)
        self.chats = dict.fromkeys(self.nodes, 0)
        self._played = played
        self._seconds = seconds

    async def parts(self, node, path, body, headers, *, lively):
        loads = self.chats.values()
        if self.chats[node] > max(1, 1.25 * sum(loads) / len(loads)):
            self._played.overloads.append(dict(self.chats))
        self.chats[node] += 1
        try:
            async with contextlib.aclosing(super().parts(node, path, body, headers, lively=lively)) as items:
                async for item in items:
                    yield item
                    # The head has come; the model writes.
                    if not isinstance(item, bytes):
                        await self.nodes[node].work(WRITER, self._seconds())
        finally:
            self.chats[node] -= 1


def play(seed, *, nodes, per_node=3, affinity=True, faults=False):
    """The conversations of a seed: `per_node` for each node, most of the time waiting for their user.

    With `faults` nodes fail, drain, and come and go, but for one.
    """
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        mock.patch.object(time, "monotonic", runner.get_loop().time),
    ):
        return runner.run(_play(seed, nodes, per_node, faults=faults, affinity=affinity))


async def _play(seed, count, per_node, *, affinity, faults):
    rng, loop, played = random.Random(seed), asyncio.get_running_loop(), Played()
    nodes = [
        SimNode(f"http://node-{index}:8081", random.Random(rng.random()), spaces={EMBEDDER: "space-a"}, alias=None)
        for index in range(count)
    ]
    for node in nodes:
        node.answer = "It is so."
    transport = ChatTransport(nodes, played, lambda: rng.uniform(0.1, 0.6))
    # Those of a large fleet are probed less often, which makes this faster.
    probe = ProbeOptions(interval=max(1.0, count / 30))
    client = NPUClient(
        [node.url for node in nodes],
        transport=lambda: transport,
        clock=loop.time,
        rng=random.Random(rng.random()),
        options=ClientOptions(affinity=affinity, probe=probe),
    )
    async with client:
        await client.health()
        troubles = [asyncio.create_task(_trouble(client, node, random.Random(rng.random()))) for node in nodes[1:]]
        if not faults:
            for task in troubles:
                task.cancel()
        talks = [_talk(client, played, random.Random(rng.random()), number) for number in range(count * per_node)]
        await asyncio.gather(*talks)
        for task in troubles:
            task.cancel()
        await asyncio.gather(*troubles, return_exceptions=True)
        found = client.fleet.runtime.pool.affinity
        played.hits, played.misses = found.hits, found.misses
    return played


async def _talk(client, played, rng, number):
    """One conversation; all have the same system prompt."""
    asked = []
    played.nodes.append(asked)
    messages = [{"role": "system", "content": "You are brief."}]
    await asyncio.sleep(rng.uniform(0.0, 20.0))
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"question {turn} of conversation {number}"})
        try:
            reply = await client.chat(messages, model=WRITER, timeout=60)
        except NPUError as error:
            played.failed[type(error).__name__] += 1
            asked.append(None)
        else:
            messages.append({"role": "assistant", "content": reply.text})
            asked.append(reply.node)
        await asyncio.sleep(rng.uniform(2.0, 6.0))


async def _trouble(client, node, rng):
    """A node fails in one way after another, or leaves the fleet for a while."""
    runtime = client.fleet.runtime
    while True:
        await asyncio.sleep(rng.uniform(2.0, 30.0))
        if rng.random() < 0.3:
            runtime.remove([node.url])
            await asyncio.sleep(rng.uniform(1.0, 5.0))
            runtime.add([node.url])
        else:
            node.set(rng.choice(FAULTS))
            await asyncio.sleep(rng.uniform(0.5, 5.0))
            node.set(None)
