"""Clients who leave, at any moment: what they asked for ends, and nothing is left of them.

That this holds at every event of every form is shown in test_cut_at_every_event.py, with a scripted engine.
"""

import asyncio

import psutil
import pytest

from tests.faults.dialects.streams import ROUTES, ROWS, at_rest, connect, raw_request
from tests.support.waiting import eventually

pytestmark = pytest.mark.real

# By its own count the engine goes on for the tokens that it takes to hear of who left, of 3,000 that were asked for:
# many where the edge process is not run for seconds.
FEW = 1000


@pytest.fixture(scope="session")
def node(whole_node):
    """Its answers do not end by themselves."""
    return whole_node


async def test_200_who_connect_and_drop_leave_nothing(http, node):
    edge = psutil.Process(node.process.pid)
    before = await at_rest(http, node)
    files, connections = edge.num_fds(), len(edge.net_connections("tcp"))

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
    await eventually(lambda: edge.num_fds() <= files and len(edge.net_connections("tcp")) <= connections)
    assert node.health()[1]["status"] == "ready"
