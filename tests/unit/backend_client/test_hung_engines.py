"""Hung engines behind a healthy /health: what they cost a caller, and how they are found, in virtual time."""

import asyncio

import pytest

from backend_client import ClientOptions, NPUUnavailableError, StreamInterrupted
from backend_client.errors import DeadlineExceeded
from backend_client.options import RetryOptions
from tests.unit.backend_client.fakes import fleet, hang, warm, with_fleet
from tests.unit.backend_client.virtual_time import in_virtual_time, now


async def embed(client, timeout):
    return (await client.embed_result("text", timeout=timeout)).node


async def generate(client, timeout):
    return (await client.generate("prompt", timeout=timeout)).node


async def stream(client, timeout):
    answer = client.stream("prompt", timeout=timeout)
    assert [piece async for piece in answer] == ["Pa", "ris"]
    return answer.result.node


CALLS = pytest.mark.parametrize("call", [embed, generate, stream])


def hang_engine(node):
    """Its /health stays as it is."""
    node.embed = hang
    node.pieces = [hang]


@CALLS
@pytest.mark.parametrize("timeout", [2.0, 5.0, 30.0])
@with_fleet(2)
async def test_it_costs_half_of_the_deadline_and_is_ejected_after_two_attempts(nodes, client, call, timeout):
    for _ in range(10):
        await call(client, timeout)
    before = len(nodes[0].requests)
    hang_engine(nodes[0])
    slow = 0
    for _ in range(20):
        began = now()
        assert await call(client, timeout) == nodes[1].url
        assert now() - began <= timeout * 0.5 + 0.05
        slow += now() - began > 0.05
    assert slow <= 2
    # Two, and the trials after its quarantines of 1, 2 and 4 s.
    assert len(nodes[0].requests) - before <= 2 + 3


@with_fleet(2)
async def test_many_calls_that_wait_when_it_hangs_eject_it_once(nodes, client):
    for _ in range(10):
        await embed(client, 1.0)
    hang_engine(nodes[0])
    calls = (embed(client, 1.0 + index / 1000) for index in range(60))
    await asyncio.gather(*calls, return_exceptions=True)  # the budget has no retry for most
    recovered, before = now(), len(nodes[0].requests)
    nodes[0].revive()
    while len(nodes[0].requests) == before:
        await embed(client, 1.0)
        await asyncio.sleep(0.05)
    assert now() - recovered <= 1.3  # the first quarantine, and not the longest


@with_fleet(2)
async def test_the_other_models_of_the_node_keep_their_traffic(nodes, client):
    nodes[0].embed = hang
    for _ in range(20):
        await embed(client, 2.0)
    served = {await generate(client, 1.0) for _ in range(20)}
    assert served == {node.url for node in nodes}


@with_fleet(2)
async def test_callers_who_allow_too_little_do_not_harm_a_healthy_node(nodes, client, caplog):
    async def slow(call):
        await asyncio.sleep(0.4)
        return await nodes[0].vectors(call)

    for node in nodes:
        node.embed = slow
    for _ in range(5):
        await embed(client, 5.0)
    for _ in range(200):
        with pytest.raises(NPUUnavailableError):
            await embed(client, 0.02)
    assert "ejected" not in caplog.text
    assert {await embed(client, 5.0) for _ in range(10)} == {node.url for node in nodes}


@in_virtual_time
async def test_callers_who_leave_count_like_deadlines():
    nodes = fleet(2)
    options = ClientOptions(retry=RetryOptions(attempts=1))
    async with warm(nodes, options=options) as client:
        for _ in range(10):
            await embed(client, 5.0)
        nodes[0].embed = hang
        left = 0
        for _ in range(20):
            try:
                await asyncio.wait_for(client.embed("text"), 1.5)
            except TimeoutError:
                left += 1
        assert left <= 2 + 3


@with_fleet(1)
async def test_a_stream_whose_caller_reads_slowly_says_nothing_of_the_node(nodes, client):
    [node] = nodes
    for _ in range(5):
        answer = client.stream("prompt")
        assert await anext(answer) == "Pa"
        await asyncio.sleep(20)
        await answer.aclose()
    assert await generate(client, 1.0) == node.url


@with_fleet(2)
async def test_a_stream_that_falls_silent_counts_against_its_node(nodes, client):
    for _ in range(10):
        await stream(client, 5.0)
    nodes[0].pieces = ["Pa", hang]
    with pytest.raises(StreamInterrupted):
        for _ in range(20):
            await stream(client, 2.0)
    nodes[0].pieces = [hang]
    before = len(nodes[0].requests)
    await stream(client, 2.0)
    await stream(client, 2.0)
    await stream(client, 2.0)
    assert len(nodes[0].requests) - before <= 1


@in_virtual_time
async def test_a_long_answer_is_not_cut_while_tokens_come():
    nodes = fleet(2)

    async def token(_):
        await asyncio.sleep(1.0)
        return "x"

    for node in nodes:
        node.pieces = [token] * 100
    async with warm(nodes) as client:
        result = await client.generate("prompt", timeout=120)
        assert result.text == "x" * 100
        assert len(result.attempts) == 1


@with_fleet(3)
async def test_an_attempt_that_cannot_be_retried_gets_all_the_time(nodes, client):
    for node in nodes:
        hang_engine(node)
    for _ in range(2):  # the first call uses up the retry budget
        began = now()
        with pytest.raises(DeadlineExceeded):
            await client.embed("text", timeout=0.3)
        assert now() - began == pytest.approx(0.3, abs=0.01)
