"""Engines that hang behind a healthy /health, load or restart: what they cost a caller, in virtual time."""

import asyncio
import contextlib
import functools

import pytest

from backend_client import InferenceClient, NPUUnavailableError, StreamInterrupted
from backend_client.calls import BaseClient
from backend_client.cloud import Ledger
from backend_client.errors import DeadlineExceeded, NodeFailed, NodeNotServing, RequestRejected
from backend_client.http.messages import HealthReport
from backend_client.options import RetryOptions, Timeouts
from backend_client.results import RawReply, Usage
from tests.unit.backend_client.fakes import EMBEDDER, WRITER, fleet, hang, report, warm, with_fleet
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
    assert [status.ejected for status in client.status()] == [{EMBEDDER: "it answers nothing"}, {}]
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


@with_fleet(2)
async def test_callers_of_slow_requests_do_not_eject_a_model_that_answers_others(nodes, client, caplog):
    async def vectors(node, call):
        if b"long" in call.body:
            await asyncio.sleep(10)
        return await node.vectors(call)

    async def embed_long():
        with contextlib.suppress(NPUUnavailableError):
            await client.embed("long", timeout=2.5)

    for node in nodes:
        node.embed = functools.partial(vectors, node)
    for _ in range(5):
        slow = [asyncio.create_task(embed_long()) for _ in range(10)]
        for _ in range(10):
            await asyncio.gather(*(embed(client, 1.0) for _ in range(10)))
            await asyncio.sleep(0.25)
        await asyncio.gather(*slow)
    assert "ejected" not in caplog.text


@with_fleet(2, retry=RetryOptions(attempts=1))
async def test_callers_who_leave_count_like_deadlines(nodes, client):
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


@with_fleet(2)
async def test_a_long_answer_is_not_cut_while_tokens_come(nodes, client):

    async def token(_):
        await asyncio.sleep(1.0)
        return "x"

    for node in nodes:
        node.pieces = [token] * 100
    result = await client.generate("prompt", timeout=120)
    assert result.text == "x" * 100
    assert len(result.attempts) == 1


@with_fleet(1, timeouts=Timeouts(generate=5.0, silence=2.0))
async def test_a_stream_that_has_begun_is_bounded_by_silence_and_by_a_timeout_of_the_caller(nodes, client):

    async def token(_):
        await asyncio.sleep(1.0)
        return "x"

    [node] = nodes
    node.pieces = [token] * 20
    assert len([piece async for piece in client.stream("prompt")]) == 20

    began = now()
    with pytest.raises(StreamInterrupted, match="deadline") as caught:
        [piece async for piece in client.stream("prompt", timeout=5.0)]
    assert now() - began == pytest.approx(5.0, abs=0.01)
    assert caught.value.partial_text == "xxxx"

    node.pieces = [token, hang]
    began = now()
    with pytest.raises(StreamInterrupted, match="within 2 s"):
        [piece async for piece in client.stream("prompt")]
    assert now() - began == pytest.approx(3.0, abs=0.1)

    node.pieces = [hang]
    began = now()
    with pytest.raises(DeadlineExceeded):
        [piece async for piece in client.stream("prompt")]
    assert now() - began == pytest.approx(5.0, abs=0.01)


@with_fleet(3)
async def test_an_attempt_that_cannot_be_retried_gets_all_the_time(nodes, client):
    for node in nodes:
        hang_engine(node)
    for _ in range(2):  # the first call uses up the retry budget
        began = now()
        with pytest.raises(DeadlineExceeded):
            await client.embed("text", timeout=0.3)
        assert now() - began == pytest.approx(0.3, abs=0.01)


RETRY = RetryOptions()


class Loading:
    """A node that loads its models for `seconds`. With `keeps` requests wait there, else they are refused at once."""

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
        before = client.fleet.dispatcher.budget.balance
        calls = [client.embed_result("text", timeout=30) for _ in range(50)]
        calls += [client.generate("prompt", timeout=30) for _ in range(50)]
        results = await asyncio.gather(*calls)
        assert {result.node for result in results} == {node.url}
        assert client.fleet.dispatcher.budget.balance >= before
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
        self.service = self

    def chat_model_for(self, name):
        return None if name == WRITER else "cloud-chat"

    def refusal(self, request):
        return None

    async def send(self, request):
        return RawReply(
            body={"text": "from the cloud", "finish_reason": "stop"},
            usage=Usage(1, 1),
            source="cloud",
            node="cloud",
            model=request.model,
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
        client = InferenceClient(npu, Cloud(), clock=now)
        began = now()
        result = await client.generate("prompt", timeout=20)
        assert (result.source, len(result.attempts)) == ("cloud", 1)
        assert now() - began <= Timeouts().share * 20
        # The cloud has no such model.
        assert (await client.generate("prompt", model=WRITER, timeout=30)).source == "node"


@with_fleet(1, retry=RETRY.model_copy(update={"per_second": 0.0, "per_request": 0.0}))
async def test_a_refusal_that_contradicts_its_report_costs_a_retry(nodes, client):
    [node] = nodes
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


def restarting(seconds=4.0, status="starting"):
    """A /health body of a node that restarts its engines."""
    body = report(status, state="loading").model_dump()
    for model in body["models"]:
        model["ready_in_s"] = seconds
    return HealthReport.model_validate(body)


class Restarting:
    """Restarts its engine: refuses at once who may not wait, and answers the others after `seconds`."""

    def __init__(self, node, seconds=4.0):
        self.node, self.seconds = node, seconds
        self.may_wait = []
        node.embed = self.answer

    async def answer(self, call):
        self.may_wait.append(call.may_wait)
        if not call.may_wait:
            raise NodeNotServing("no", node=self.node.url, code="engine_unavailable", retry_after=self.seconds)
        await asyncio.sleep(self.seconds)
        return await self.node.vectors(call)


@with_fleet(2)
async def test_a_call_fails_over_from_an_engine_that_has_just_died(nodes, client):
    down = Restarting(nodes[0])
    for _ in range(20):
        result = await client.embed_result("text", timeout=18)
        assert result.node == nodes[1].url
    assert down.may_wait == [False]


@with_fleet(1)
async def test_a_call_waits_at_the_only_node_before_and_after_its_probe_tells_of_the_restart(nodes, client):
    [node] = nodes
    down = Restarting(node)
    first = asyncio.create_task(client.embed_result("text", timeout=18))
    await asyncio.sleep(0.1)
    node.health = restarting()
    await asyncio.sleep(2.5)
    second = asyncio.create_task(client.embed_result("text", timeout=18))
    assert [(await each).node for each in (first, second)] == [node.url] * 2
    assert down.may_wait == [True, True]


@pytest.mark.parametrize("status", ["draining", "failed"])
@in_virtual_time
async def test_a_node_that_shuts_down_or_does_not_come_back_gets_nothing(status):
    [node] = nodes = fleet(1)
    node.health = restarting(status=status) if status == "draining" else report("failed", state="failed")
    async with warm(nodes) as client:
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=18)
        assert not node.requests


@pytest.mark.parametrize("begun", [False, True])
@with_fleet(1)
async def test_a_stream_that_loses_the_only_engine_is_retried_until_its_first_part_was_handed_on(nodes, client, begun):
    [node] = nodes
    died, up = asyncio.Event(), asyncio.Event()

    async def dies(_):
        await died.wait()
        raise NodeNotServing("died", node=node.url, code="engine_unavailable")

    async def restarted(_):
        await up.wait()
        return "x"

    node.pieces = ["x", dies] if begun else [dies]
    stream = client.stream("prompt", timeout=60)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.5)
    node.health, node.pieces = restarting(10.0), [restarted, "x"]
    died.set()
    await asyncio.sleep(10)
    node.health = report()
    up.set()
    assert await first == "x"
    if begun:
        with pytest.raises(StreamInterrupted):
            await anext(stream)
    else:
        assert [piece async for piece in stream] == ["x"]


class Breakable:
    """Runs what comes within 50 ms together, and each that names the death of an engine alone. "poison" crashes its
    engine, which is back after 4 s.
    """

    def __init__(self, node):
        self.node, self.deaths = node, 0
        self._together, self._back_at = [], 0.0
        node.embed = self.answer

    async def answer(self, call):
        if now() < self._back_at:
            raise NodeNotServing("no", node=self.node.url, status=503, code="engine_unavailable", retry_after=4.0)
        texts = [] if "X-NPU-Engine-Deaths" in call.headers else self._together
        texts.append(call.body)
        await asyncio.sleep(0.05)
        if texts is self._together:
            self._together = []
        if any(b"poison" in text for text in texts):
            if now() >= self._back_at:
                self.deaths += 1
            self._back_at = now() + 4.0
            raise NodeNotServing("died", node=self.node.url, status=503, code="engine_crashed", retry_after=4.0)
        return await self.node.vectors(call)


@with_fleet(3, retry=RetryOptions(initial=100))
async def test_a_request_that_crashed_two_engines_goes_to_no_third_and_those_beside_it_are_answered(nodes, client):
    breakable = [Breakable(node) for node in nodes]
    innocent = [asyncio.create_task(client.embed_result(f"text {index}")) for index in range(30)]
    with pytest.raises(RequestRejected, match="do not send it again") as caught:
        await client.embed("poison")
    assert (caught.value.status, caught.value.code) == (400, "request_breaks_engine")
    assert [attempt.code for attempt in caught.value.attempts] == ["engine_crashed"] * 2
    assert sum(each.deaths for each in breakable) == 2
    for result in await asyncio.gather(*innocent):
        assert result.attempts[-1].outcome == "ok"
