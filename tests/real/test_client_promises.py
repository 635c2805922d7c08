"""The first eight promises over real sockets: real nodes with real models, behind a proxy that makes faults.

The exact times are shown in virtual time (tests/unit/backend_client/test_promises.py); here it is shown that the same
things happen on sockets.
"""

import asyncio

import pytest

from backend_client import NPUClient, NPUUnavailableError, StreamInterrupted
from backend_client.errors import ContextLengthExceeded, DeadlineExceeded, ModelNotFound
from backend_client.fleet.breaker import BreakerState
from backend_client.options import BreakerOptions, ClientOptions
from tests.faults.proxy import Fault, FaultProxy

pytestmark = pytest.mark.real

RESET = Fault(cut_after=0)


async def test_tokens_are_counted_as_the_answer_counts_them(node):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zürich, 東京?"}]
    async with NPUClient([node.url]) as client:
        counted = await client.count_tokens(messages)
        assert counted == (await client.chat(messages, max_tokens=1)).usage.prompt_tokens
        assert await client.count_tokens("Hello Hello") == 2


@pytest.fixture
async def proxies(node):
    """Three ways to the same real node."""
    async with (
        FaultProxy(node.url).running() as one,
        FaultProxy(node.url).running() as two,
        FaultProxy(node.url).running() as three,
    ):
        yield [one, two, three]


@pytest.fixture
async def client(proxies):
    async with NPUClient([proxy.url for proxy in proxies]) as client:
        await client.health()
        yield client


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


def status_of(client, proxy):
    return next(node for node in client.status() if node.url == proxy.url)


async def test_1_a_dead_node_gets_no_request_after_two_failures(proxies):
    # A quarantine of a second may end before the 40 calls do, and then one more call tries the node.
    options = ClientOptions(breaker=BreakerOptions(base=60.0, longest=60.0, longest_probed=60.0))
    async with NPUClient([proxy.url for proxy in proxies], options=options) as client:
        await client.health()
        proxies[0].fault = Fault(cut_after=0, probes=True)
        results = [await client.embed_result(f"text {index}") for index in range(40)]
    assert proxies[0].requests <= 2
    assert {result.attempts[-1].outcome for result in results} == {"ok"}


async def test_1_a_frozen_node_is_found_out_by_its_probes_and_its_work_done_elsewhere(client, proxies):
    proxies[0].fault = Fault(silent=True, probes=True)
    results = await asyncio.gather(*(client.embed_result(f"text {index}") for index in range(12)))
    assert all(result.node != proxies[0].url for result in results)
    assert any(attempt.outcome == "NodeLost" for result in results for attempt in result.attempts)
    before = proxies[0].requests
    for index in range(20):
        await client.embed(f"more {index}")
    assert proxies[0].requests == before


async def test_2_a_node_that_comes_back_serves_again(client, proxies):
    await proxies[0].stop()
    await until(lambda: not status_of(client, proxies[0]).usable)
    await client.embed("while it is away")
    await proxies[0].listen()
    await until(lambda: status_of(client, proxies[0]).usable)
    before = proxies[0].requests
    while proxies[0].requests == before:
        await client.embed("again")
    assert status_of(client, proxies[0]).breaker is BreakerState.CLOSED


async def test_3_half_open_admits_exactly_one_request(proxies):
    proxy = proxies[0]
    async with NPUClient([proxy.url]) as client:
        await client.health()
        proxy.fault = RESET
        with pytest.raises(NPUUnavailableError):
            await client.embed("text")
        await until(lambda: client.status()[0].breaker is BreakerState.HALF_OPEN)
        proxy.fault = Fault(latency=0.3)
        before = proxy.requests
        seen = []
        calls = [asyncio.ensure_future(client.embed("text")) for _ in range(10)]
        for call in calls:
            call.add_done_callback(lambda _: seen.append(proxy.requests - before))
        # The others wait for the end of the trial.
        assert all(await asyncio.gather(*calls))
        assert seen[0] == 1


async def test_4_refused_requests_leave_the_node_healthy(client):
    with pytest.raises(ModelNotFound):
        await client.embed("text", model="no-such-model")
    with pytest.raises(ContextLengthExceeded):
        await client.embed("word " * 400)
    assert all(node.usable for node in client.status())


async def test_5_three_attempts_on_three_nodes(client, proxies):
    for proxy in proxies:
        proxy.fault = RESET
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    assert {attempt.node for attempt in caught.value.attempts} == {proxy.url for proxy in proxies}
    assert [proxy.requests for proxy in proxies] == [1, 1, 1]


@pytest.mark.parametrize("fault", [Fault(silent=True), Fault(latency=60), Fault(bandwidth=100)], ids=str)
async def test_6_the_deadline_ends_every_wait(client, proxies, fault):
    for proxy in proxies:
        proxy.fault = fault
    with pytest.raises(DeadlineExceeded):
        await client.embed("text", timeout=0.3)
    with pytest.raises((DeadlineExceeded, StreamInterrupted)):
        [_ async for _ in client.stream("prompt", timeout=0.3)]
    assert all(node.in_flight == 0 for node in client.status())


async def test_7_with_all_nodes_down_calls_fail_without_an_attempt(client, proxies):
    for proxy in proxies:
        await proxy.stop()
    await until(lambda: not any(node.usable for node in client.status()))
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    assert not caught.value.attempts
    async with NPUClient([proxy.url for proxy in proxies]) as cold:
        with pytest.raises(NPUUnavailableError):
            await cold.embed("text")


async def test_8_nothing_is_retried_after_the_first_token(client, proxies):
    for proxy in proxies:
        proxy.fault = Fault(cut_after=900)
    stream = client.stream("Count from one to fifty.", max_new_tokens=60)
    with pytest.raises(StreamInterrupted) as caught:
        [_ async for _ in stream]
    assert caught.value.partial_text
    assert sum(proxy.requests for proxy in proxies) == 1


async def test_8_a_dead_host_is_passed_over(client, proxies):
    """That what was never sent costs nothing is shown in virtual time; here a kept-alive connection may die as well."""
    await proxies[0].stop()
    await proxies[1].stop()
    for index in range(5):
        result = await client.embed_result(f"text {index}")
        assert result.node == proxies[2].url
        for attempt in result.attempts[:-1]:
            assert (attempt.outcome, attempt.sent) in {("NodeUnreachable", False), ("ConnectionLost", True)}
