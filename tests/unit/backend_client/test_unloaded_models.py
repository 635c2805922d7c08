"""Models that a node loads when a request needs them, in virtual time."""

import asyncio

import pytest

from backend_client import NPUUnavailableError
from tests.unit.backend_client.fakes import fleet, hang, report, warm
from tests.unit.backend_client.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_model_that_is_not_in_memory_is_served():
    [node] = nodes = fleet(1)
    node.health = report("ready", state="unloaded")
    async with warm(nodes) as client:
        assert await client.embed("text")
        assert (await client.generate("prompt")).text == "Paris"


@in_virtual_time
async def test_a_node_that_has_it_in_memory_goes_first():
    nodes = fleet(3)
    nodes[0].health = nodes[1].health = report("ready", state="unloaded")
    async with warm(nodes) as client:
        assert {(await client.embed_result("text")).node for _ in range(30)} == {nodes[2].url}
        nodes[2].die()
        await asyncio.sleep(3)
        assert (await client.embed_result("text")).node != nodes[2].url


@in_virtual_time
async def test_silence_while_it_loads_does_not_eject_it():
    [node] = nodes = fleet(1)
    node.health = report("ready", state="unloaded")
    async with warm(nodes) as client:
        node.embed = hang
        for _ in range(4):
            with pytest.raises(NPUUnavailableError):
                await client.embed("text", timeout=2)
        node.embed = node.vectors
        assert await client.embed("text")


@in_virtual_time
async def test_a_load_may_take_longer_than_an_attempt():
    [node] = nodes = fleet(1)
    node.health = report("ready", state="unloaded")

    async def loads_first(call):
        node.health = report("starting", state="loading")
        await asyncio.sleep(20)
        node.health = report()
        return await node.vectors(call)

    async with warm(nodes) as client:
        node.embed = loads_first
        result = await client.embed_result("text", timeout=30)
        assert [attempt.outcome for attempt in result.attempts] == ["ok"]
