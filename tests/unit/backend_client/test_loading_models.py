"""Models that load: ready nodes go first, and where there is none requests wait, in virtual time."""

import asyncio

import pytest

from backend_client import InferenceClient, NPUUnavailableError
from backend_client.calls import BaseClient
from backend_client.cloud import Ledger
from backend_client.errors import NodeFailed, NodeNotServing
from backend_client.options import ClientOptions, RetryOptions, Timeouts
from backend_client.results import RawReply, Usage
from tests.unit.backend_client.fakes import WRITER, fleet, hang, report, warm
from tests.unit.backend_client.virtual_time import in_virtual_time, now

RETRY = RetryOptions()


class Loading:
    """A node that loads its models for so many seconds. `keeps`: requests wait there; else they are refused at once."""

    def __init__(self, node, seconds, *, keeps):
        self.node, self.keeps = node, keeps
        self.loaded = asyncio.Event()
        node.health = report("starting", state="loading")
        node.embed, node.pieces = self.embed, [self.piece]
        asyncio.get_running_loop().call_later(seconds, self.load)

    def load(self):
        self.node.health = report()
        self.loaded.set()

    async def wait(self):
        if not self.loaded.is_set() and not self.keeps:
            raise NodeNotServing("loads", node=self.node.url, status=503, code="model_loading", retry_after=1.0)
        await self.loaded.wait()

    async def embed(self, call):
        await self.wait()
        return await self.node.vectors(call)

    async def piece(self, _):
        await self.wait()
        return "Paris"


@pytest.mark.parametrize("keeps", [True, False])
@in_virtual_time
async def test_requests_wait_for_the_only_node_and_cost_no_retries(keeps):
    [node] = nodes = fleet(1)
    Loading(node, 20.0, keeps=keeps)
    async with warm(nodes) as client:
        before = client.backend.runtime.budget.balance
        calls = [client.embed_result("text", timeout=30) for _ in range(50)]
        calls += [client.generate("prompt", timeout=30) for _ in range(50)]
        results = await asyncio.gather(*calls)
        assert {result.node for result in results} == {node.url}
        assert client.backend.runtime.budget.balance >= before
        # Once before it is loaded, if it refuses that, and once afterwards.
        assert len(node.requests) <= 200


@pytest.mark.parametrize("keeps", [True, False])
@in_virtual_time
async def test_a_node_that_is_ready_goes_first(keeps):
    nodes = fleet(3)
    for node in nodes[:2]:
        Loading(node, 20.0, keeps=keeps)
    async with warm(nodes) as client:
        assert {(await client.embed_result("text")).node for _ in range(30)} == {nodes[2].url}
        assert not nodes[0].requests + nodes[1].requests
        await asyncio.sleep(22)
        assert {(await client.embed_result("text")).node for _ in range(60)} == {node.url for node in nodes}


@in_virtual_time
async def test_a_request_that_failed_on_the_ready_node_is_retried_there_and_does_not_wait_for_another():
    nodes = fleet(2)
    Loading(nodes[1], 20.0, keeps=True)
    async with warm(nodes) as client:

        async def fails_once(call):
            nodes[0].embed = nodes[0].vectors
            raise NodeFailed("boom", node=nodes[0].url, status=500)

        nodes[0].embed = fails_once
        result = await client.embed_result("text")
        assert [attempt.node for attempt in result.attempts] == [nodes[0].url] * 2


@in_virtual_time
async def test_a_load_that_takes_longer_than_the_call_may_is_not_waited_for():
    [node] = nodes = fleet(1)
    node.health = report("starting", state="loading")
    node.embed = NodeNotServing("loads", node=node.url, status=503, code="model_loading", retry_after=90.0)
    async with warm(nodes) as client:
        began = now()
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text", timeout=30)
        assert now() - began <= 0.05
        assert caught.value.retry_after == pytest.approx(90.0, abs=0.1)


class Cloud(BaseClient):
    """A client of a cloud that answers at once."""

    spaces = ("space-a",)

    def __init__(self):
        self.ledger = Ledger({})
        self.backend = self

    def chat_model_for(self, name):
        return None if name == WRITER else "cloud-chat"

    def refusal(self, job):
        return None

    async def exchange(self, job):
        return RawReply(
            body={"text": "from the cloud", "finish_reason": "stop"},
            usage=Usage(1, 1),
            source="cloud",
            node="cloud",
            model=job.model,
            device=None,
            request_id="r",
            attempts=(),
        )


@pytest.mark.parametrize("keeps", [True, False])
@in_virtual_time
async def test_where_the_cloud_may_answer_a_call_waits_no_longer_than_for_a_hung_engine(keeps):
    [node] = nodes = fleet(1)
    Loading(node, 20.0, keeps=keeps)
    async with warm(nodes) as npu:
        client = InferenceClient(npu, Cloud())
        began = now()
        result = await client.generate("prompt", timeout=20)
        assert (result.source, len(result.attempts)) == ("cloud", 1)
        assert now() - began <= Timeouts().share * 20
        # The cloud has no such model.
        assert (await client.generate("prompt", model=WRITER, timeout=30)).source == "npu"


@in_virtual_time
async def test_a_refusal_that_contradicts_its_report_costs_a_retry():
    [node] = nodes = fleet(1)
    options = ClientOptions(retry=RETRY.model_copy(update={"per_second": 0.0, "per_request": 0.0}))
    async with warm(nodes, options=options) as client:
        node.embed = NodeNotServing("loads", node=node.url, status=503, code="model_loading", retry_after=0.0)
        for _ in range(10):
            with pytest.raises(NPUUnavailableError):
                await client.embed("text", timeout=1)
        assert len(node.requests) <= 10 + RETRY.initial


@in_virtual_time
async def test_a_node_that_has_it_in_memory_goes_first():
    nodes = fleet(3)
    nodes[0].health = nodes[1].health = report("ready", state="unloaded")
    async with warm(nodes) as client:
        assert {(await client.embed_result("text")).node for _ in range(30)} == {nodes[2].url}
        nodes[2].die()
        await asyncio.sleep(3)
        assert (await client.embed_result("text")).node != nodes[2].url


@in_virtual_time
async def test_silence_while_it_loads_does_not_eject_it():
    [node] = nodes = fleet(1)
    node.health = report("ready", state="unloaded")
    async with warm(nodes) as client:
        node.embed = hang
        for _ in range(4):
            with pytest.raises(NPUUnavailableError):
                await client.embed("text", timeout=2)
        node.embed = node.vectors
        assert await client.embed("text")


@in_virtual_time
async def test_a_load_may_take_longer_than_an_attempt():
    [node] = nodes = fleet(1)
    node.health = report("ready", state="unloaded")

    async def loads_first(call):
        node.health = report("starting", state="loading")
        await asyncio.sleep(20)
        node.health = report()
        return await node.vectors(call)

    async with warm(nodes) as client:
        node.embed = loads_first
        result = await client.embed_result("text", timeout=30)
        assert [attempt.outcome for attempt in result.attempts] == ["ok"]
