"""More requests fail at once than the retry budget covers: they wait for it, within limits. In virtual time."""

import asyncio

import pytest

from backend_client import ClientOptions, NPUUnavailableError
from backend_client.errors import ConnectionLost, NodeFailed
from backend_client.options import RetryOptions
from tests.unit.backend_client.fakes import fleet, warm
from tests.unit.backend_client.virtual_time import in_virtual_time

RETRY = RetryOptions()


def breaks_when(node, event):
    async def embed(_):
        await event.wait()
        raise ConnectionLost("reset", node=node.url)

    return embed


def retries(nodes):
    ids = [request_id for node in nodes for request_id in node.request_ids]
    return len(ids) - len(set(ids))


@in_virtual_time
async def test_what_a_dying_node_had_in_flight_is_served_by_another_one_within_the_budget():
    nodes = fleet(2)
    dies = asyncio.Event()
    async with warm(nodes) as client:
        nodes[0].embed = breaks_when(nodes[0], dies)
        began = asyncio.get_running_loop().time()
        calls = [asyncio.ensure_future(client.embed_result("text")) for _ in range(12)]
        await asyncio.sleep(0.01)
        nodes[0].die()
        dies.set()
        results = await asyncio.gather(*calls)
        took = asyncio.get_running_loop().time() - began
        assert {result.node for result in results} == {nodes[1].url}
        # More than the client begins with, so some had to wait.
        assert RETRY.initial + 0.1 * 12 < retries(nodes) <= RETRY.initial + 0.1 * 12 + took
        assert client.backend.runtime.budget.refused == 0


@in_virtual_time
async def test_a_call_waits_no_longer_than_its_patience_and_half_of_its_time():
    nodes = fleet(2)
    options = ClientOptions(retry=RetryOptions(initial=0.0, per_second=0.01))
    async with warm(nodes, options=options) as client:
        for timeout, most in ((30.0, RETRY.patience), (2.0, 1.0)):
            nodes[0].embed = nodes[1].embed = NodeFailed("boom", node=nodes[0].url, status=500)
            refused = client.backend.runtime.budget.refused
            began = asyncio.get_running_loop().time()
            with pytest.raises(NPUUnavailableError, match="in 1 attempts"):
                await client.embed("text", timeout=timeout)
            assert most - 0.2 <= asyncio.get_running_loop().time() - began <= most + 0.1
            assert client.backend.runtime.budget.refused == refused + 1
