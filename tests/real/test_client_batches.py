"""Many texts over several ways to a real node: in order, whatever breaks on the way, and exact about what failed."""

import numpy as np
import pytest

from backend_client import NPUClient
from backend_client.errors import ContextLengthExceeded, EmbedManyFailed
from tests.faults.proxy import Fault, FaultProxy

pytestmark = pytest.mark.real

TEXTS = [f"Text number {index} is about {'rivers' if index % 3 else 'mountains'}." for index in range(400)]


@pytest.fixture
async def proxies(node):
    """Two ways to the same real node."""
    async with FaultProxy(node.url).running() as one, FaultProxy(node.url).running() as two:
        yield [one, two]


@pytest.fixture
async def client(proxies):
    async with NPUClient([proxy.url for proxy in proxies]) as client:
        await client.health()
        yield client


@pytest.fixture
async def expected(client):
    """The vectors by single calls of a few texts, by index. They also give the client a few retries to spend."""
    return {index: await client.embed(TEXTS[index]) for index in range(0, 400, 19)}


def assert_in_order(vectors, expected):
    assert vectors.shape == (400, 384)
    for index, vector in expected.items():
        # A batch is padded as a single text is not; that moves the last bits.
        assert float(np.dot(vectors[index], vector)) > 0.999, index


async def test_a_way_that_breaks_in_the_middle_costs_no_vector(client, proxies, expected):
    seen = []

    def progress(done, total):
        seen.append((done, total))
        proxies[0].fault = Fault(cut_after=700)

    result = await client.embed_many_result(TEXTS, progress=progress)
    proxies[0].fault = Fault(cut_after=700)
    again = await client.embed_many_result(TEXTS)
    for found in (result, again):
        assert_in_order(found.vectors, expected)
        assert sum(found.served.values()) == 400
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (400, 400)
    assert any(attempt.outcome != "ok" for attempt in result.attempts + again.attempts)


async def test_texts_that_come_one_by_one_keep_their_order(client, expected):
    async def texts():
        for text in TEXTS:
            yield text

    batches = [batch.vectors async for batch in client.embed_stream(texts())]
    assert len(batches) > 4
    assert_in_order(np.concatenate(batches), expected)


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
    truncated = await client.embed_many(texts, truncate=True)
    assert np.isfinite(truncated).all()
