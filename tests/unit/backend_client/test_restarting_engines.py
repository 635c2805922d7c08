"""Nodes whose engine is being restarted: other nodes go first, and where there is none the request waits, in virtual
time."""

import asyncio

import pytest

from backend_client import NPUUnavailableError, StreamInterrupted
from backend_client.errors import NodeNotServing
from backend_client.http.health import HealthReport
from tests.unit.backend_client.fakes import fleet, report, warm, with_fleet
from tests.unit.backend_client.virtual_time import in_virtual_time, now


def restarting(seconds=4.0, status="starting"):
    """A /health body of a node that restarts its engines."""
    body = report(status, state="loading").model_dump()
    for model in body["models"]:
        model["ready_in_s"] = seconds
    return HealthReport.model_validate(body)


class Node:
    """Restarts its engine: refuses at once who may not wait, and answers the others after `seconds`."""

    def __init__(self, node, seconds=4.0):
        self.node, self.seconds = node, seconds
        self.may_wait = []
        node.embed = self.answer

    async def answer(self, call):
        self.may_wait.append(call.may_wait)
        if not call.may_wait:
            raise NodeNotServing("no", node=self.node.url, code="engine_unavailable", retry_after=self.seconds)
        await asyncio.sleep(self.seconds)
        return await self.node.vectors(call)


@with_fleet(2)
async def test_a_call_fails_over_from_an_engine_that_has_just_died(nodes, client):
    down = Node(nodes[0])
    for _ in range(20):
        result = await client.embed_result("text", timeout=18)
        assert result.node == nodes[1].url
    assert down.may_wait == [False]


@with_fleet(1)
async def test_a_call_waits_at_the_only_node_before_and_after_its_probe_tells_of_the_restart(nodes, client):
    [node] = nodes
    down = Node(node)
    first = asyncio.create_task(client.embed_result("text", timeout=18))
    await asyncio.sleep(0.1)
    node.health = restarting()
    await asyncio.sleep(2.5)
    second = asyncio.create_task(client.embed_result("text", timeout=18))
    assert [(await each).node for each in (first, second)] == [node.url] * 2
    assert down.may_wait == [True, True]


@pytest.mark.parametrize("status", ["draining", "failed"])
@in_virtual_time
async def test_a_node_that_shuts_down_or_does_not_come_back_gets_nothing(status):
    [node] = nodes = fleet(1)
    node.health = restarting(status=status) if status == "draining" else report("failed", state="failed")
    async with warm(nodes) as client:
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=18)
        assert not node.requests


class Engine:
    """The engine of a node's model for generation. `kill` ends what it streams, as nodes tell it: by an event without a
    Retry-After; what comes until it is up again waits, as long as it may.
    """

    def __init__(self, node, *, seconds=10.0, pieces=3):
        self.node, self.seconds, self.pieces = node, seconds, pieces
        self.killed = asyncio.Event()
        self.up = asyncio.Event()
        self.up.set()
        self.restarts = 0
        node.pieces = [self.begin, *[self.piece] * (pieces - 1)]

    async def begin(self, call):
        if not self.up.is_set() and not call.may_wait:
            raise NodeNotServing("no", node=self.node.url, code="engine_unavailable", retry_after=self.seconds)
        await self.up.wait()
        return await self.piece(call)

    async def piece(self, _):
        # The pieces of one answer take a second each, so a kill finds them on their way.
        restarts = self.restarts
        await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(1.0):
                await self.killed.wait()
        except TimeoutError:
            pass
        if self.restarts != restarts:
            raise NodeNotServing("died", node=self.node.url, code="engine_unavailable")
        return "x"

    async def kill(self):
        """Kill it now; /health tells it from the next probe on. Returns when it is up again."""
        self.restarts += 1
        self.up.clear()
        self.killed.set()
        self.killed = asyncio.Event()
        self.node.health = restarting(self.seconds)
        await asyncio.sleep(self.seconds)
        self.node.health = report()
        self.up.set()


@pytest.mark.parametrize("begun", [False, True])
@with_fleet(1)
async def test_a_stream_that_loses_the_only_engine_is_retried_until_its_first_part_was_handed_on(nodes, client, begun):
    [node] = nodes
    engine = Engine(node)
    stream = client.stream("prompt", timeout=60)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(1.5 if begun else 0.5)
    restart = asyncio.create_task(engine.kill())
    assert await first == "x"
    if begun:
        with pytest.raises(StreamInterrupted):
            await anext(stream)
    else:
        assert [piece async for piece in stream] == ["x", "x"]
    await restart


@with_fleet(1)
async def test_the_deadline_and_three_attempts_bound_the_waiting(nodes, client):
    [node] = nodes
    engine = Engine(node, seconds=10.0)
    restart = asyncio.create_task(engine.kill())
    await asyncio.sleep(0)
    for timeout in (0.5, 3.0):
        began = now()
        with pytest.raises(NPUUnavailableError):
            await client.generate("prompt", timeout=timeout)
        assert now() - began <= timeout
    await restart

    async def dies(_):
        raise NodeNotServing("died", node=node.url, code="engine_unavailable")

    node.pieces = ["x", dies]
    with pytest.raises(NPUUnavailableError) as caught:
        await client.generate("prompt", timeout=600)
    assert [attempt.outcome for attempt in caught.value.attempts] == ["NodeNotServing"] * 3
