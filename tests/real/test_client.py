"""The client on real nodes behind proxies that make faults: calls, batches and streams.

The exact times are shown in virtual time (tests/unit/backend_client), every form of a broken reply on sockets
(tests/faults/client); here it is shown that the same happens with real models.
"""

import asyncio

import numpy as np
import pytest

from backend_client import NPUClient, NPUUnavailableError, StreamInterrupted
from backend_client.errors import ContextLengthExceeded, DeadlineExceeded, EmbedManyFailed
from backend_client.fleet.breaker import BreakerState
from tests.faults.proxy import Fault, FaultProxy

pytestmark = pytest.mark.real
TEXTS = [f"Text number {index} is about {'rivers' if index % 3 else 'mountains'}." for index in range(400)]


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


async def test_a_frozen_node_is_found_by_its_probes_and_its_work_is_done_elsewhere(client, proxies):
    proxies[0].fault = Fault(silent=True, probes=True)
    results = await asyncio.gather(*(client.embed_result(f"text {index}") for index in range(12)))
    assert all(result.node != proxies[0].url for result in results)
    assert any(attempt.outcome == "NodeLost" for result in results for attempt in result.attempts)
    before = proxies[0].requests
    for index in range(20):
        await client.embed(f"more {index}")
    assert proxies[0].requests == before


async def test_a_half_open_breaker_admits_exactly_one_request(proxies):
    proxy = proxies[0]
    async with NPUClient([proxy.url]) as client:
        await client.health()
        proxy.fault = Fault(cut_after=0)
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


@pytest.mark.parametrize("fault", [Fault(silent=True), Fault(latency=60), Fault(bandwidth=100)], ids=str)
async def test_the_deadline_ends_every_wait(client, proxies, fault):
    for proxy in proxies:
        proxy.fault = fault
    with pytest.raises(DeadlineExceeded):
        await client.embed("text", timeout=0.3)
    with pytest.raises((DeadlineExceeded, StreamInterrupted)):
        [_ async for _ in client.stream("prompt", timeout=0.3)]
    assert all(node.in_flight == 0 for node in client.status())


async def test_with_all_nodes_down_calls_fail_without_an_attempt(client, proxies):
    for proxy in proxies:
        await proxy.stop()
    await until(lambda: not any(node.usable for node in client.status()))
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed("text")
    assert not caught.value.attempts
    async with NPUClient([proxy.url for proxy in proxies]) as cold:
        with pytest.raises(NPUUnavailableError):
            await cold.embed("text")


async def test_nothing_is_retried_after_the_first_token(client, proxies):
    for proxy in proxies:
        proxy.fault = Fault(cut_after=900)
    stream = client.stream("Count from one to fifty.", max_new_tokens=60)
    with pytest.raises(StreamInterrupted) as caught:
        [_ async for _ in stream]
    assert caught.value.partial_text
    assert sum(proxy.requests for proxy in proxies) == 1


@pytest.fixture
async def expected(client):
    """The vectors by single calls of a few texts, by index. They also give the client a few retries to spend."""
    return {index: await client.embed(TEXTS[index]) for index in range(0, 400, 19)}


async def test_a_way_that_breaks_in_the_middle_costs_no_vector(client, proxies, expected):
    def progress(_done, _total):
        proxies[0].fault = Fault(cut_after=700)

    result = await client.embed_many_result(TEXTS, progress=progress)
    again = await client.embed_many_result(TEXTS)
    for found in (result, again):
        assert found.vectors.shape == (400, 384)
        for index, vector in expected.items():
            # A batch is padded as a single text is not; that moves the last bits.
            assert float(np.dot(found.vectors[index], vector)) > 0.999, index
        assert sum(found.served.values()) == 400
    assert any(attempt.outcome != "ok" for attempt in result.attempts + again.attempts)


async def test_a_text_that_is_too_long_fails_its_batch_and_no_other(client, expected):
    texts = [*TEXTS[:100], "word " * 400, *TEXTS[101:]]
    with pytest.raises(EmbedManyFailed) as caught:
        await client.embed_many(texts)
    [failure] = caught.value.failures
    assert isinstance(failure.error, ContextLengthExceeded)
    assert failure.start <= 100 < failure.stop
    vectors = caught.value.vectors
    assert np.isnan(vectors[failure.start : failure.stop]).all()
    for index, vector in expected.items():
        if not failure.start <= index < failure.stop:
            assert float(np.dot(vectors[index], vector)) > 0.999
