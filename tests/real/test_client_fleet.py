"""Real nodes: of three one killed, one frozen, one slow; all restarted in turn, under load."""

import contextlib

import pytest

from backend_client import NPUClient
from tests.support.fleet import Load, real_fleet

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

# Calls a second: enough that each fault meets some, whichever node it is at.
RATE = 20
TIMEOUT_S = 20


@contextlib.asynccontextmanager
async def loaded_fleet(size):
    """Real nodes, a client that knows them, and load on it that has run for a while."""
    async with real_fleet(size) as nodes, NPUClient([node.url for node in nodes]) as client:
        await client.health()
        load = Load(client, rate=RATE, timeout=TIMEOUT_S)
        await load.more(3 * RATE)
        assert not load.errors
        yield nodes, client, load
        await load.drained()
        # Each call ended in time and was answered, whatever happened meanwhile.
        assert not load.errors
        assert max(record.seconds for record in load.records) <= TIMEOUT_S + 1


async def test_one_killed_one_frozen_one_slow():
    # More than 5 s: four nodes start, and probes have to find out what has failed.
    async with loaded_fleet(3) as ((dead, frozen, slow), client, load):
        slow.slow(0.1)
        await dead.kill()
        frozen.freeze()
        while [node.url for node in client.status() if node.usable] != [slow.url]:
            await load.more(1)
        await load.more(2 * RATE)
        # A retry for each tenth call and each second, and the two that a client begins with.
        assert load.retries <= 2 + 0.1 * len(load.records) + load.seconds
        frozen.thaw()
        await load.served_by(frozen)
        await dead.start()
        await load.served_by(dead)


async def test_a_rolling_restart_of_all_fails_no_call(long):
    # More than 5 s: two nodes start (three with --long), and each again, one after another.
    async with loaded_fleet(3 if long else 2) as (nodes, _, load):
        for node in nodes:
            assert await node.terminate() == 0
            await load.more(RATE)
            await node.start()
            await load.served_by(node)
