"""Where one node alone has a model, its failure is no "unknown model", however many nodes there are."""

import asyncio

import pytest

from backend_client import NPUUnavailableError
from backend_client.errors import ModelMissing, ModelNotFound, NodeUnreachable
from tests.unit.backend_client.fakes import fleet, hang, report, warm
from tests.unit.backend_client.virtual_time import in_virtual_time

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
