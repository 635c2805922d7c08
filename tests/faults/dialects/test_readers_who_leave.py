"""Clients who leave, at any moment: what they asked for ends, and nothing is left of them."""

import asyncio

import pytest

from tests.faults.dialects.streams import ROUTES, ROWS, at_rest, body_of, connect, held_by, metrics, raw_request

pytestmark = pytest.mark.real

# By its own count the engine goes on for the tokens that it takes to hear of it, of 3,000 that were asked for: many
# where the edge process is not run for seconds.
FEW = 1000


@pytest.fixture(scope="session")
def node(whole_node):
    """Its answers do not end by themselves."""
    return whole_node


@pytest.mark.parametrize("route", ROUTES)
async def test_a_reader_who_leaves_stops_the_generation(http, node, route):
    before = await at_rest(http, node)
    async with http.post(node.url + route, json=body_of(route)) as reply:
        # Enough to be past what a stream tells before its first token.
        for _ in range(20):
            assert await reply.content.readline()
        reply.close()
    async with asyncio.timeout(60):
        while (await metrics(http, node))[ROWS] == before[ROWS]:
            await asyncio.sleep(0.1)
    after = await at_rest(http, node)
    assert after[ROWS] - before[ROWS] < FEW


@pytest.mark.parametrize("route", ROUTES)
async def test_a_caller_who_does_not_wait_for_the_whole_answer_stops_it(http, node, route):
    before = await at_rest(http, node)
    _, writer = await connect(node)
    writer.write(raw_request(route, stream=False))
    async with asyncio.timeout(60):
        while (await metrics(http, node))["npu_node_admission_outstanding"] == 0:
            await asyncio.sleep(0.01)
    writer.transport.abort()
    after = await at_rest(http, node)
    assert after[ROWS] - before[ROWS] < FEW


async def test_200_who_connect_and_drop_leave_nothing(http, node):
    before = await at_rest(http, node)
    held = held_by(node)

    async def drop(number):
        request = raw_request(list(ROUTES)[number % len(ROUTES)])
        reader, writer = await connect(node)
        if number % 2:
            # Within the head, within the body, or at the end of it.
            writer.write(request[: number * len(request) // 199])
        else:
            # Within the answer, whose first bytes are its head.
            writer.write(request)
            await reader.read(1)
        await writer.drain()
        writer.transport.abort()

    await asyncio.gather(*(drop(number) for number in range(200)))
    after = await at_rest(http, node)
    # A hundred readers and a few tokens each.
    assert after[ROWS] - before[ROWS] < 15 * FEW
    await returned_to(held, node)
    async with http.get(node.url + "/health") as reply:
        assert (await reply.json())["status"] == "ready"


async def returned_to(held, node):
    async with asyncio.timeout(30):
        while any(now > before for now, before in zip(held_by(node), held, strict=True)):
            await asyncio.sleep(0.1)
