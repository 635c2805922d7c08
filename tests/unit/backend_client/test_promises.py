"""The promises of the client, in virtual time: exact, and in milliseconds. Over real sockets: tests/faults/client."""

import asyncio

import pytest

from backend_client import NPUUnavailableError, RequestRejected
from backend_client.errors import (
    ConnectionLost,
    ContextLengthExceeded,
    FleetOverloaded,
    ModelMissing,
    NodeFailed,
    NodeOverloaded,
    NodeUnreachable,
    PayloadTooLarge,
)
from backend_client.fleet.node import BreakerState
from tests.unit.backend_client.fakes import client_of, fleet, hang, report, with_fleet
from tests.unit.backend_client.virtual_time import in_virtual_time, now


async def load(client, *, every=0.01, seconds=5.0):
    errors = []

    async def call():
        try:
            await client.embed("text", timeout=10)
        except NPUUnavailableError as error:
            errors.append(error)

    end = now() + seconds
    async with asyncio.TaskGroup() as group:
        while now() < end:
            group.create_task(call())
            await asyncio.sleep(every)
    return errors


@with_fleet(2)
async def test_1_a_dead_node_gets_no_request_after_two_connection_failures(nodes, client):
    nodes[0].die()
    nodes[0].health = hang  # so that requests alone, and no probe, find it out
    assert not await load(client, seconds=0.5)
    assert len(nodes[0].requests) == 2
    assert len(nodes[1].requests) >= 48


@with_fleet(2)
async def test_1_a_frozen_node_gets_no_request_three_seconds_after_its_last_good_probe(nodes, client):
    await asyncio.sleep(5.5)
    nodes[0].freeze()
    last_good = max(time for time in nodes[0].probes if time <= now())
    assert not await load(client, seconds=8)
    assert nodes[0].requests
    assert max(nodes[0].requests) <= last_good + 3.0


@with_fleet(2)
async def test_1_what_a_frozen_node_was_working_on_is_done_elsewhere_within_the_three_seconds(nodes, client):
    nodes[0].freeze()
    began = now()
    results = await asyncio.gather(*(client.embed_result("text") for _ in range(10)))
    assert {result.node for result in results} == {nodes[1].url}
    assert now() - began <= 3.0
    assert any(attempt.outcome == "NodeLost" for result in results for attempt in result.attempts)


@with_fleet(2)
async def test_2_a_node_that_was_started_again_serves_within_a_second_of_its_models_being_loaded(nodes, client):
    nodes[0].die()
    assert not await load(client, every=0.1, seconds=100)
    nodes[0].revive()  # in the middle of its longest quarantine
    nodes[0].health = report("starting", state="loading")
    assert not await load(client, every=0.1, seconds=3)
    nodes[0].health = report()
    before, loaded = len(nodes[0].requests), now()
    assert not await load(client, every=0.1, seconds=5)
    assert nodes[0].requests[before] - loaded <= 2.2  # a probe, and what remains of a quarantine


@pytest.mark.parametrize(
    ("probes", "promised"), [("fail", [1, 2, 4, 8, 16, 30, 30, 30]), ("pass", [1, 2, 4, 4, 4, 4, 4, 4])]
)
@with_fleet(1)
async def test_2_quarantines_double_up_to_thirty_seconds_or_to_four_while_probes_pass(nodes, client, probes, promised):
    [node] = nodes
    if probes == "fail":
        node.die()
    else:
        node.embed = ConnectionLost("reset", node=node.url)
    quarantines = []
    while len(quarantines) < len(promised):
        while client.status()[0].breaker is not BreakerState.OPEN:
            with pytest.raises(NPUUnavailableError):
                # Too little time to wait for the end of the quarantine.
                await client.embed("text", timeout=0.3)
            await asyncio.sleep(0.001)
        opened = now()
        while client.status()[0].breaker is BreakerState.OPEN:
            await asyncio.sleep(0.01)
        quarantines.append(now() - opened)
    for measured, expected in zip(quarantines, promised, strict=True):
        # The failed call goes on for a moment after it opened the breaker, which is when the measuring begins.
        assert expected * 0.8 - 0.25 <= measured <= min(promised[-1], expected * 1.2) + 0.02


@with_fleet(1)
async def test_3_half_open_admits_exactly_one_request(nodes, client):
    [node] = nodes
    node.embed = ConnectionLost("reset", node=node.url)
    with pytest.raises(NPUUnavailableError):
        await client.embed("text", timeout=0.3)
    while client.status()[0].breaker is not BreakerState.HALF_OPEN:
        await asyncio.sleep(0.05)
    released = asyncio.Event()

    async def slow(call):
        await released.wait()
        return await node.vectors(call)

    node.embed = slow
    before = len(node.requests)
    trial = asyncio.create_task(client.embed("trial"))
    await asyncio.sleep(0.1)
    others = [client.embed("other", timeout=0.05) for _ in range(20)]
    failed = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(error, NPUUnavailableError) for error in failed)
    patient = [asyncio.create_task(client.embed("patient")) for _ in range(20)]
    await asyncio.sleep(1.0)
    assert len(node.requests) - before == 1
    released.set()
    await asyncio.gather(trial, *patient)
    await asyncio.gather(*(client.embed("after") for _ in range(20)))


@pytest.mark.parametrize("error", [RequestRejected, ContextLengthExceeded, PayloadTooLarge, ModelMissing])
@with_fleet(1)
async def test_4_a_refused_request_never_changes_health(nodes, client, error):
    [node] = nodes
    refused = error("no", node=node.url, status=400) if error is not ModelMissing else error("no", node=node.url)
    node.embed = refused
    for _ in range(50):
        with pytest.raises(RequestRejected):
            await client.embed("text", model="other" if error is ModelMissing else None)
    node.embed = node.vectors
    assert client.status()[0].breaker is BreakerState.CLOSED
    await client.embed("text")
    if error is not ModelMissing:
        assert len(node.requests) == 51


@with_fleet(1)
async def test_4_a_node_that_is_idle_again_serves_before_its_retry_after_has_passed(nodes, client):
    [node] = nodes
    node.health = report(queue=8)
    await asyncio.sleep(1.5)
    node.embed = NodeOverloaded("full", node=node.url, status=429, retry_after=13)
    with pytest.raises(NPUUnavailableError):
        await client.embed("text", timeout=5)
    node.embed = node.vectors
    # A call that has the time waits, and looks again with each probe.
    waiting = asyncio.create_task(client.embed_result("text", timeout=30))
    await asyncio.sleep(2.5)
    assert len(node.requests) == 1, "it is still as busy as it was"
    node.health = report(queue=4)
    began = now()
    await waiting
    assert now() - began < 2.5
    assert await client.embed("text", timeout=1)


@with_fleet(1)
async def test_4_a_busy_fleet_is_waited_for_when_there_is_time_and_refused_at_once_when_not(nodes, client):
    [node] = nodes
    overloaded = NodeOverloaded("full", node=node.url, status=429, retry_after=0.5)

    async def full_once(call):
        node.embed = node.vectors
        raise overloaded

    node.embed = full_once
    began = now()
    result = await client.embed_result("text")
    assert [attempt.outcome for attempt in result.attempts] == ["NodeOverloaded", "ok"]
    assert 0.5 <= now() - began <= 0.7

    node.embed = NodeOverloaded("full", node=node.url, status=429, retry_after=20)
    began = now()
    with pytest.raises(NPUUnavailableError) as first:
        await client.embed("text", timeout=5)
    assert now() - began < 0.05
    assert first.value.retry_after == 20
    with pytest.raises(FleetOverloaded):
        await client.embed("text", timeout=5)


@with_fleet(5)
async def test_5_at_most_three_attempts_and_never_twice_the_same_node_while_another_is_alive(nodes, client):
    for node in nodes:
        node.embed = NodeFailed("boom", node=node.url, status=500)
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    asked = [attempt.node for attempt in caught.value.attempts]
    assert len(asked) == len(set(asked)) == 3
    assert len({request_id for node in nodes for request_id in node.request_ids}) == 1


@in_virtual_time
async def test_7_all_down_is_said_at_once_when_known_and_within_three_seconds_cold():
    nodes = fleet(3)
    nodes[0].die()
    nodes[1].freeze()
    nodes[2].health = report("draining")
    async with client_of(nodes) as client:
        began = now()
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        assert now() - began <= 3.0
        assert not any(node.requests for node in nodes)
        for node in nodes:
            assert node.url in str(caught.value)
        began = now()
        with pytest.raises(NPUUnavailableError):
            await client.embed("text")
        assert now() - began <= 0.1


@with_fleet(6)
async def test_8_what_was_never_sent_is_retried_free(nodes, client):
    for node in nodes[:5]:
        node.embed = NodeUnreachable("cannot connect", node=node.url)
    for _ in range(3):
        result = await client.embed_result("text")
        assert result.node == nodes[5].url
    # The budget is as it was, so three calls that do need it have their two retries and no more.
    nodes[5].embed = NodeFailed("boom", node=nodes[5].url, status=500)
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    assert [attempt.outcome for attempt in caught.value.attempts].count("NodeFailed") == 3
