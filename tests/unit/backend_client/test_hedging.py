"""Hedged embeddings, in virtual time."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client import ClientOptions, NPUUnavailableError
from backend_client.errors import NodeFailed
from backend_client.options import HedgeOptions
from backend_client.routing.hedge import Latencies
from tests.unit.backend_client.fakes import fleet, hang, warm
from tests.unit.backend_client.virtual_time import in_virtual_time

OPTIONS = ClientOptions(hedge=HedgeOptions(percentile=0.9, least=10))


def now():
    return asyncio.get_running_loop().time()


def slow_by(node, seconds):
    async def embed(call):
        await asyncio.sleep(seconds)
        return await node.vectors(call)

    node.embed = embed


async def learn_latencies(client, nodes):
    """Forty calls of 2 to 12 ms."""
    for index in range(40):
        for node in nodes:
            slow_by(node, index % 10 / 1000)
        await client.embed("text")
    for node in nodes:
        node.embed = node.vectors
    await asyncio.sleep(10)  # the budget fills up again


@in_virtual_time
async def test_a_slow_answer_is_overtaken_by_another_nodes():
    nodes = fleet(2)
    async with warm(nodes, options=OPTIONS) as client:
        await learn_latencies(client, nodes)
        slow_by(nodes[0], 5.0)
        began = now()
        results = [await client.embed_result("text") for _ in range(4)]
        assert now() - began < 0.5
        assert {result.node for result in results} == {nodes[1].url}
        assert client.status()[0].in_flight == 0


@in_virtual_time
async def test_hedges_are_paid_from_the_retry_budget():
    nodes = fleet(2)
    async with warm(nodes, options=OPTIONS) as client:
        await learn_latencies(client, nodes)
        for node in nodes:
            slow_by(node, 1.0)
        before = sum(len(node.requests) for node in nodes)
        budget = client.backend.runtime.budget.balance
        await asyncio.gather(*(client.embed("text") for _ in range(100)))
        extra = sum(len(node.requests) for node in nodes) - before - 100
        assert 0 < extra <= budget + 100 * 0.1 + 1


@in_virtual_time
async def test_hedges_do_not_pay_into_the_retry_budget():
    nodes = fleet(2)
    async with warm(nodes, options=OPTIONS) as client:
        await learn_latencies(client, nodes)
        for node in nodes:
            slow_by(node, 1.0)
        budget = client.backend.runtime.budget
        before, began = budget.balance, now()
        sent = sum(len(node.requests) for node in nodes)
        await client.embed("text")
        hedges = sum(len(node.requests) for node in nodes) - sent - 1
        assert hedges == 1
        assert budget.balance == pytest.approx(before + 0.1 + (now() - began) - hedges)


@in_virtual_time
async def test_without_a_percentile_nothing_is_asked_twice():
    nodes = fleet(2)
    async with warm(nodes) as client:
        await learn_latencies(client, nodes)
        slow_by(nodes[0], 2.0)
        slow_by(nodes[1], 2.0)
        before = sum(len(node.requests) for node in nodes)
        await client.embed("text")
        assert sum(len(node.requests) for node in nodes) == before + 1


@in_virtual_time
async def test_when_both_fail_the_first_error_is_raised():
    nodes = fleet(2)
    async with warm(nodes, options=OPTIONS) as client:
        await learn_latencies(client, nodes)

        async def fail(_):
            await asyncio.sleep(1.0)
            raise NodeFailed("boom", node="node", status=500)

        for node in nodes:
            node.embed = fail
        with pytest.raises(NPUUnavailableError):
            await client.embed("text")


@in_virtual_time
async def test_leaving_cancels_both():
    nodes = fleet(2)
    async with warm(nodes, options=OPTIONS) as client:
        await learn_latencies(client, nodes)
        for node in nodes:
            node.embed = hang
        task = asyncio.create_task(client.embed("text"))
        await asyncio.sleep(0.2)
        assert [node.in_flight for node in client.status()] == [1, 1]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [node.in_flight for node in client.status()] == [0, 0]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_the_percentile_is_that_of_the_last_samples(durations):
    options = HedgeOptions(percentile=0.9, samples=50, least=10)
    latencies = Latencies(options)
    for duration in durations:
        latencies.add(duration)
    recent = sorted(durations[-50:])
    expected = None if len(recent) < 10 else recent[min(len(recent) - 1, int(len(recent) * 0.9))]
    assert latencies.percentile() == expected
    assert expected is None or np.mean(np.array(recent) <= expected) >= 0.9
