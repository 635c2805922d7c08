"""Probes: what they decide, how often they run, and that they never end, in virtual time."""

import asyncio
import itertools
import logging

import pytest

from backend_client import ClientOptions, NPUUnavailableError
from backend_client.http.messages import HealthReport
from backend_client.options import ProbeOptions
from tests.unit.backend_client.fakes import EMBEDDER, WRITER, client_of, fleet, hang, report, warm, with_fleet
from tests.unit.backend_client.virtual_time import in_virtual_time, now


def states(status, embedder, writer):
    body = report(status).model_dump(exclude_unset=True)
    for model in body["models"]:
        model["state"] = embedder if model["id"] == EMBEDDER else writer
    return HealthReport.model_validate(body)


@pytest.mark.parametrize("status", ["starting", "degraded", "failed", "ready"])
@in_virtual_time
async def test_a_model_that_serves_is_used_whatever_the_node_calls_itself(status):
    [node] = nodes = fleet(1)
    node.health = states(status, "ready", "failed")
    async with client_of(nodes) as client:
        assert (await client.embed_result("text")).node == node.url
        with pytest.raises(NPUUnavailableError, match="failed"):
            await client.generate("prompt", model=WRITER)
        node.health = states(status, "failed", "ready")
        await asyncio.sleep(1.2)
        assert (await client.generate("prompt")).text == "Paris"
        with pytest.raises(NPUUnavailableError, match="failed"):
            await client.embed("text")


async def fails():
    raise RuntimeError("a bug")


async def is_cancelled_from_inside():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("bug", [fails, is_cancelled_from_inside])
@with_fleet(2)
async def test_a_probe_that_meets_a_bug_is_logged_and_goes_on(nodes, client, bug, caplog):
    nodes[0].health = bug
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(5)
    assert caplog.text.count("restarting it") >= 2
    assert "a bug" not in caplog.text
    nodes[0].revive()
    for _ in range(100):
        await client.embed("text")
        await asyncio.sleep(0.1)
    assert client.status()[0].usable
    assert nodes[0].requests


@pytest.mark.parametrize("shift", [-2e-10, 0.0, 2e-10])
@with_fleet(1, probe=ProbeOptions(jitter=0.0))
async def test_a_call_that_ends_just_as_its_node_is_lost_does_not_end_the_probes(nodes, client, shift, caplog):
    """The deadline of a call and the second failed probe of its node fall on the same turn of the event loop."""
    [node] = nodes
    await asyncio.sleep(1000.5 - now())
    node.freeze()
    # The probes begin at 1001.0 and 1002.0; the second one fails at 1002.8.
    with pytest.raises(NPUUnavailableError), caplog.at_level(logging.ERROR):
        await client.embed("text", timeout=1002.8 - now() + shift)
    assert now() == pytest.approx(1002.8)
    await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not client.status()[0].usable


@in_virtual_time
async def test_a_blocked_event_loop_is_not_the_silence_of_a_node():
    [node] = nodes = fleet(1)
    probes = itertools.count()

    async def blocked():
        # The caller's code blocks, while every other probe is under way, for longer than a probe may take.
        asyncio.get_running_loop().now += 2.0 * (next(probes) % 2)
        await asyncio.sleep(0.1)
        return report()

    async with warm(nodes, options=ClientOptions(probe=ProbeOptions(failures=1))) as client:
        node.health = blocked
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert client.status()[0].usable


@with_fleet(1)
async def test_a_dead_node_is_found_out_in_a_loop_that_is_always_late(nodes, client):
    nodes[0].health = hang
    loop = asyncio.get_running_loop()
    for _ in range(100):
        loop.now += 2.0
        await asyncio.sleep(0.001)
    assert not client.status()[0].usable


@with_fleet(1)
async def test_silent_probes_of_a_node_that_answers_requests_do_not_count(nodes, client):
    [node] = nodes
    node.health = hang
    for _ in range(100):
        await client.embed("text")
        await asyncio.sleep(0.1)
    assert client.status()[0].usable
