"""A node that refuses the API key, in virtual time."""

import asyncio

import pytest

from backend_client import NPUUnavailableError
from backend_client.errors import AuthenticationFailed
from tests.unit.backend_client.fakes import fleet, warm
from tests.unit.backend_client.virtual_time import in_virtual_time


def refuse(node):
    node.embed = AuthenticationFailed(f"{node.url}: wrong key", node=node.url, status=401, code="invalid_api_key")


@in_virtual_time
async def test_the_other_nodes_serve_when_one_refuses_the_key():
    nodes = fleet(3)
    async with warm(nodes) as client:
        refuse(nodes[0])
        served = {(await client.embed_result("text")).node for _ in range(30)}
        assert served == {nodes[1].url, nodes[2].url}
        assert len(nodes[0].requests) <= 1


@in_virtual_time
async def test_a_key_that_every_node_refuses_is_reported_with_what_to_check():
    nodes = fleet(3)
    async with warm(nodes) as client:
        for node in nodes:
            refuse(node)
        for _ in range(10):
            with pytest.raises(AuthenticationFailed, match="wrong key") as caught:
                await client.embed("text")
            assert caught.value.status == 401
        # After all three have refused it, each call asks one whether that is still so.
        assert sum(len(node.requests) for node in nodes) == 3 + 9


@in_virtual_time
async def test_a_refused_key_on_one_node_and_a_dead_other_is_unavailability():
    nodes = fleet(2)
    async with warm(nodes) as client:
        refuse(nodes[0])
        nodes[1].die()
        await asyncio.sleep(3)
        for _ in range(3):
            with pytest.raises(NPUUnavailableError, match="wrong key"):
                await client.embed("text")


@in_virtual_time
async def test_a_rotated_key_is_accepted_again_at_once():
    [node] = nodes = fleet(1)
    async with warm(nodes) as client:
        refuse(node)
        with pytest.raises(AuthenticationFailed):
            await client.embed("text")
        node.embed = node.vectors
        assert await client.embed("text")


@in_virtual_time
@pytest.mark.parametrize("count", [4, 7])
async def test_a_large_fleet_that_refuses_the_key_says_so_at_the_first_call(count):
    nodes = fleet(count)
    async with warm(nodes) as client:
        for node in nodes:
            refuse(node)
        with pytest.raises(AuthenticationFailed, match="wrong key"):
            await client.embed("text")
        assert [len(node.requests) for node in nodes] == [1] * count


@in_virtual_time
@pytest.mark.parametrize("accepts", range(7))
async def test_the_one_node_that_accepts_the_key_is_found_by_the_first_call(accepts):
    nodes = fleet(7)
    async with warm(nodes) as client:
        for node in nodes:
            refuse(node)
        nodes[accepts].embed = nodes[accepts].vectors
        assert (await client.embed_result("text")).node == nodes[accepts].url
