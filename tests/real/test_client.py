"""The client on real nodes behind proxies that make faults: calls, batches and streams.

The exact times are shown in virtual time (tests/unit/backend_client), every form of a broken reply on sockets
(tests/faults/client); here it is shown that the same happens with real models.
"""

import numpy as np
import pytest

from backend_client import NPUClient, StreamInterrupted
from backend_client.errors import DeadlineExceeded
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


@pytest.mark.parametrize("fault", [Fault(silent=True), Fault(latency=60), Fault(bandwidth=100)], ids=str)
async def test_the_deadline_ends_every_wait(client, proxies, fault):
    for proxy in proxies:
        proxy.fault = fault
    with pytest.raises(DeadlineExceeded):
        await client.embed("text", timeout=0.3)
    with pytest.raises((DeadlineExceeded, StreamInterrupted)):
        [_ async for _ in client.stream("prompt", timeout=0.3)]
    assert all(node.in_flight == 0 for node in client.status())


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
