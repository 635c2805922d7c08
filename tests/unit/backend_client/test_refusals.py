"""Nodes that refuse requests or alone have a model, and the budget of retries, in virtual time."""

import asyncio

import pytest

from backend_client import NPUUnavailableError
from backend_client.errors import (
    ConnectionLost,
    FleetOverloaded,
    ModelMissing,
    ModelNotFound,
    NodeFailed,
    NodeNotServing,
    NodeOverloaded,
    NodeUnreachable,
)
from backend_client.options import RetryOptions
from backend_client.routing.call import RetryBudget
from tests.unit.backend_client.fakes import fleet, hang, report, warm, with_fleet
from tests.unit.backend_client.virtual_time import in_virtual_time, now

RETRY = RetryOptions()
REFUSALS = pytest.mark.parametrize(
    "refusal",
    [
        lambda node: NodeOverloaded("full", node=node.url, status=429, retry_after=0.0),
        lambda node: NodeOverloaded("full", node=node.url, status=429, retry_after=0.001),
        lambda node: NodeNotServing("no", node=node.url, status=503, code="unavailable", retry_after=0.0),
    ],
    ids=["429, 0 s", "429, 1 ms", "503, 0 s"],
)


@REFUSALS
@pytest.mark.parametrize("rate", [4.0, 100.0])
@pytest.mark.parametrize("refusing", [1, 2])
@with_fleet(3)
async def test_nodes_that_refuse_do_not_drain_the_budget_while_another_is_idle(nodes, client, refusal, rate, refusing):
    for node in nodes[:refusing]:
        node.embed = refusal(node)
    budget = client.fleet.dispatcher.budget
    began, least = now(), budget.balance
    for _ in range(int(20 * rate)):
        result = await client.embed_result("text")
        assert result.node in {node.url for node in nodes[refusing:]}
        least = min(least, budget.balance)
        await asyncio.sleep(1 / rate)
    # Reports do not show that they refuse, so each is tried now and then, less often than the budget earns a retry.
    for node in nodes[:refusing]:
        assert 1 <= len(node.requests) <= (now() - began) / 2
    assert least >= RETRY.initial - refusing - 1e-6
    assert not any(status.ejected or status.trouble for status in client.status()), "busy is not dead"


@REFUSALS
@pytest.mark.parametrize("count", [1, 2])
@in_virtual_time
async def test_a_node_is_asked_again_after_all_others_and_a_backoff(refusal, count):
    nodes = fleet(count)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = refusal(node)
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        attempts = caught.value.attempts
        assert len(attempts) == RETRY.attempts
        assert {attempt.node for attempt in attempts[:count]} == {node.url for node in nodes}
        for before, after in zip(attempts, attempts[count:], strict=False):
            assert before.node == after.node
            assert after.started - (before.started + before.duration) >= RETRY.pause


@with_fleet(2)
async def test_a_node_that_refused_without_work_gets_nothing_for_all_of_its_retry_after(nodes, client):
    nodes[0].embed = NodeOverloaded("limited", node=nodes[0].url, status=429, retry_after=10.0)
    while not nodes[0].requests:
        await client.embed("text")
    began = now()
    while now() - began < 9.9:
        assert (await client.embed_result("text")).node == nodes[1].url
        await asyncio.sleep(0.1)
    assert len(nodes[0].requests) == 1
    nodes[0].embed = nodes[0].vectors
    await asyncio.sleep(5.0)
    assert {(await client.embed_result("text")).node for _ in range(20)} == {node.url for node in nodes}


@with_fleet(2)
async def test_a_node_that_was_full_gets_requests_as_soon_as_it_has_less_work(nodes, client):
    under_way = asyncio.Event()

    async def slow(call):
        await under_way.wait()
        return await nodes[0].vectors(call)

    for node in nodes:
        node.embed = slow
    long = [asyncio.create_task(client.embed("text")) for _ in range(8)]
    await asyncio.sleep(0.1)
    nodes[0].embed = NodeOverloaded("full", node=nodes[0].url, status=429, retry_after=0.0)
    nodes[1].embed = nodes[1].vectors
    asked = len(nodes[0].requests)
    while len(nodes[0].requests) == asked:
        assert (await client.embed_result("text")).node == nodes[1].url
    nodes[0].embed = nodes[0].vectors
    under_way.set()
    await asyncio.gather(*long)
    await asyncio.sleep(RETRY.pause)
    assert {(await client.embed_result("text")).node for _ in range(20)} == {node.url for node in nodes}


@with_fleet(3)
async def test_a_full_fleet_says_to_come_again_when_the_first_of_its_nodes_has_room(nodes, client):
    for node, seconds in zip(nodes, (60.0, 20.0, 40.0), strict=True):
        node.embed = NodeOverloaded("full", node=node.url, status=429, retry_after=seconds)
    with pytest.raises(NPUUnavailableError):
        await client.embed("text", timeout=5)
    with pytest.raises(FleetOverloaded) as caught:
        await client.embed("text", timeout=5)
    assert caught.value.retry_after == pytest.approx(20, abs=1)


@in_virtual_time
async def test_a_node_whose_npu_is_full_gets_the_requests_that_need_no_npu():
    (node,) = fleet(1)
    node.health = report(placements=("NPU", "CPU"))

    async def embed(call):
        if call.headers.get("X-NPU-Require-Device") == "NPU":
            raise NodeOverloaded("full", node=node.url, status=429, retry_after=60.0)
        return await node.vectors(call)

    node.embed = embed
    async with warm([node]) as client:
        for _ in range(2):
            with pytest.raises(FleetOverloaded):
                await client.embed("text", require_device="NPU", timeout=5)
            assert (await client.embed_result("text", timeout=5)).node == node.url
    assert len(node.requests) == 1 + 2, "for the NPU it is asked once"


def test_a_quiet_day_saves_up_no_more_retries_than_the_options_say():
    clock = [0.0]
    budget = RetryBudget(RetryOptions(saved=3.0), lambda: clock[0])
    clock[0] += 86_400.0
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]


def breaks_when(node, event):
    async def embed(_):
        await event.wait()
        raise ConnectionLost("reset", node=node.url)

    return embed


def retries(nodes):
    ids = [request_id for node in nodes for request_id in node.request_ids]
    return len(ids) - len(set(ids))


@with_fleet(2)
async def test_what_a_dying_node_had_in_flight_is_served_by_another_one_within_the_budget(nodes, client):
    dies = asyncio.Event()
    nodes[0].embed = breaks_when(nodes[0], dies)
    began = now()
    calls = [asyncio.ensure_future(client.embed_result("text")) for _ in range(12)]
    await asyncio.sleep(0.01)
    nodes[0].die()
    dies.set()
    results = await asyncio.gather(*calls)
    took = now() - began
    assert {result.node for result in results} == {nodes[1].url}
    # More than the client begins with, so some had to wait.
    assert RETRY.initial + 0.1 * 12 < retries(nodes) <= RETRY.initial + 0.1 * 12 + took
    assert client.fleet.dispatcher.budget.refused == 0


@with_fleet(2, retry=RetryOptions(initial=0.0, per_second=0.01))
async def test_a_call_waits_no_longer_than_its_patience_and_half_of_its_time(nodes, client):
    for timeout, most in ((30.0, RETRY.patience), (2.0, 1.0)):
        nodes[0].embed = nodes[1].embed = NodeFailed("boom", node=nodes[0].url, status=500)
        refused = client.fleet.dispatcher.budget.refused
        began = now()
        with pytest.raises(NPUUnavailableError, match="in 1 attempts"):
            await client.embed("text", timeout=timeout)
        assert most - 0.2 <= now() - began <= most + 0.1
        assert client.fleet.dispatcher.budget.refused == refused + 1


RARE = "rare"


def fleet_with_one_holder(count):
    nodes = fleet(count)
    for node in nodes:
        node.embed = ModelMissing("no such model", node=node.url, status=404)
    nodes[0].embed = nodes[0].vectors
    common = report()
    model = common.models[0].model_copy(update={"id": RARE, "aliases": ("seldom",)})
    nodes[0].health = common.model_copy(update={"models": (*common.models, model)})
    return nodes


async def outcomes(client, name):
    """What ten calls after each pause end with: the kinds of errors."""
    ends = []
    for pause in (0.0, 0.3, 1.0, 5.0):
        await asyncio.sleep(pause)
        calls = (client.embed("text", model=name, timeout=3) for _ in range(10))
        ends += await asyncio.gather(*calls, return_exceptions=True)
    return ends


@pytest.mark.parametrize("name", [RARE, "seldom"])
@pytest.mark.parametrize("count", [2, 5, 30])
@pytest.mark.parametrize("fault", ["die", "freeze", "hang", "break"])
@in_virtual_time
async def test_calls_end_with_an_unavailable_fleet_where_the_only_node_of_a_model_fails(fault, count, name):
    nodes = fleet_with_one_holder(count)
    async with warm(nodes) as client:
        assert (await client.embed_result("text", model=name)).node == nodes[0].url
        match fault:
            case "hang":
                nodes[0].embed = hang
            case "break":
                nodes[0].embed = NodeUnreachable("reset", node=nodes[0].url)
            case _:
                getattr(nodes[0], fault)()
        for error in await outcomes(client, name):
            assert isinstance(error, NPUUnavailableError), (error, getattr(error, "attempts", None))


@in_virtual_time
async def test_a_model_that_no_node_reports_is_not_found_beside_a_dead_node_that_never_had_it():
    nodes = fleet_with_one_holder(30)
    async with warm(nodes) as client:
        nodes[1].die()
        for _ in range(3):
            await asyncio.sleep(2)
            await client.health()
        nodes[0].embed = ModelMissing("no such model", node=nodes[0].url, status=404)
        with pytest.raises(ModelNotFound):
            await client.embed("text", model="no-such-model")


@pytest.mark.parametrize("count", [1, 2])
@in_virtual_time
async def test_a_node_that_lists_a_model_and_does_not_know_it_is_asked_once_a_call(count):
    nodes = fleet(count)
    for node in nodes:
        node.embed = ModelMissing("no such model", node=node.url, status=404)
    async with warm(nodes) as client:
        with pytest.raises(ModelNotFound) as caught:
            await client.embed("text")
    assert sorted(attempt.node for attempt in caught.value.attempts) == sorted(node.url for node in nodes)


@with_fleet(2)
async def test_a_model_whose_node_is_away_is_unavailable_and_not_unknown(nodes, client):
    nodes[0].die()
    nodes[1].embed = ModelMissing("no such model", node=nodes[1].url, status=404)
    await asyncio.sleep(5)  # its probes have failed
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    assert not isinstance(caught.value, ModelNotFound)
