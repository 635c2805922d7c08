"""Nodes whose engine is being restarted: other nodes go first, and where there is none the request waits, in virtual
time."""

import asyncio

import pytest

from backend_client import NPUUnavailableError
from backend_client._protocol.report import HealthReport
from backend_client.errors import NodeNotServing
from tests.unit.backend_client.fakes import fleet, report, warm
from tests.unit.backend_client.virtual_time import in_virtual_time


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


@in_virtual_time
async def test_a_call_fails_over_from_an_engine_that_has_just_died():
    nodes = fleet(2)
    async with warm(nodes) as client:
        down = Node(nodes[0])
        for _ in range(20):
            result = await client.embed_result("text", timeout=18)
            assert result.node == nodes[1].url
        assert down.may_wait == [False]


@in_virtual_time
async def test_a_call_waits_at_the_only_node_before_and_after_its_probe_tells_of_the_restart():
    [node] = nodes = fleet(1)
    async with warm(nodes) as client:
        down = Node(node)
        first = asyncio.create_task(client.embed_result("text", timeout=18))
        await asyncio.sleep(0.1)
        node.health = restarting()
        await asyncio.sleep(2.5)
        second = asyncio.create_task(client.embed_result("text", timeout=18))
        assert [(await each).node for each in (first, second)] == [node.url] * 2
        assert down.may_wait == [True, True]


@in_virtual_time
async def test_a_call_waits_when_every_node_restarts_its_engine():
    nodes = fleet(2)
    async with warm(nodes) as client:
        down = [Node(node) for node in nodes]
        result = await client.embed_result("text", timeout=18)
        assert sorted(waited for each in down for waited in each.may_wait) == [False, True]
        assert [attempt.outcome for attempt in result.attempts] == ["NodeNotServing", "ok"]


@in_virtual_time
async def test_a_node_that_restarts_the_model_gets_nothing_while_another_serves():
    nodes = fleet(3)
    nodes[0].health = nodes[1].health = restarting()
    async with warm(nodes) as client:
        assert {(await client.embed_result("text")).node for _ in range(20)} == {nodes[2].url}
        assert not nodes[0].requests


@in_virtual_time
async def test_a_node_that_asks_for_a_pause_meanwhile_is_not_asked():
    [node] = nodes = fleet(1)
    node.health = restarting(seconds=60.0)
    async with warm(nodes) as client:
        node.embed = NodeNotServing("no", node=node.url, code="engine_unavailable", retry_after=60.0)
        for _ in range(3):
            with pytest.raises(NPUUnavailableError):
                await client.embed("text", timeout=5)
        assert len(node.requests) == 1


@pytest.mark.parametrize("status", ["draining", "failed"])
@in_virtual_time
async def test_a_node_that_shuts_down_or_does_not_come_back_gets_nothing(status):
    [node] = nodes = fleet(1)
    node.health = restarting(status=status) if status == "draining" else report("failed", state="failed")
    async with warm(nodes) as client:
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=18)
        assert not node.requests


@pytest.mark.parametrize("kind", ["generate", "stream"])
@in_virtual_time
async def test_generations_fail_over_too(kind):
    nodes = fleet(2)
    asked = []

    async def refuse(call):
        asked.append(call.may_wait)
        raise NodeNotServing("no", node=nodes[0].url, code="engine_unavailable", retry_after=4.0)

    async with warm(nodes) as client:
        nodes[0].pieces = [refuse]
        for _ in range(20):
            if kind == "generate":
                assert (await client.generate("prompt", timeout=18)).node == nodes[1].url
            else:
                assert "".join([piece async for piece in client.stream("prompt", timeout=18)]) == "Paris"
        assert asked == [False]
