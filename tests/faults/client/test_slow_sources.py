"""Texts that come slowly, fail or never end: only their own call notices."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backend_client.errors import ClientClosed, DeadlineExceeded
from backend_client.testing import fake_vector

BATCH = 64
TEXTS = [f"text {number}" for number in range(BATCH + 6)]
WAIT_S = 30


class Stuck:
    """Gives some texts, then waits for `released`."""

    def __init__(self, texts):
        self.texts = texts
        self.reached, self.released = threading.Event(), threading.Event()

    def __iter__(self):
        yield from self.texts
        self.reached.set()
        assert self.released.wait(2 * WAIT_S)

    async def later(self):
        for text in self.texts:
            yield text
        self.reached.set()
        await asyncio.to_thread(self.released.wait, 2 * WAIT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.released.set()


def broken(texts):
    yield from texts
    raise OSError("the source failed")


async def broken_later(texts):
    for text in texts:
        yield text
    raise OSError("the source failed")


@pytest.fixture
def client(fleet):
    with fleet.client() as client:
        yield client


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_calls_of_other_threads_do_not_wait_for_a_source(client, elsewhere):
    with Stuck(TEXTS) as source:
        streamed = elsewhere.submit(list, client.embed_stream(source))
        assert source.reached.wait(WAIT_S)
        assert len(client.embed("text", timeout=WAIT_S)) == 8
        source.released.set()
        assert sum(len(batch.vectors) for batch in streamed.result(WAIT_S)) == len(TEXTS)


@pytest.mark.parametrize("make", [broken, broken_later])
async def test_a_source_that_fails_does_so_after_the_vectors_of_all_its_texts(fleet, make):
    rows = []
    async with fleet.async_client() as client:
        with pytest.raises(OSError, match="the source failed"):
            async for batch in client.embed_stream(make(TEXTS)):
                rows.extend(batch.vectors)
    np.testing.assert_array_equal(rows, [fake_vector(text) for text in TEXTS])


def test_closing_the_client_ends_a_stream_whose_source_is_stuck(client, elsewhere):
    with Stuck([]) as source:
        streamed = elsewhere.submit(list, client.embed_stream(source))
        assert source.reached.wait(WAIT_S)
        client.close()
        with pytest.raises(ClientClosed):
            streamed.result(WAIT_S)


READERS = pytest.mark.parametrize("read", [iter, Stuck.later])


@READERS
async def test_the_deadline_of_embed_many_holds_while_its_source_is_stuck(fleet, read):
    with Stuck([]) as source:
        async with fleet.async_client() as client, asyncio.timeout(WAIT_S):
            with pytest.raises(DeadlineExceeded, match="after 0 texts had been read; increase `timeout`"):
                await client.embed_many(read(source), timeout=0.05)


async def test_embed_many_reads_no_faster_than_it_embeds(fleet):
    read, ahead = 0, []

    def texts():
        nonlocal read
        for _ in range(50 * BATCH):
            read += 1
            yield "text"

    async with fleet.async_client() as client:
        await client.embed_many(texts(), progress=lambda done, _: ahead.append(read - done))
    assert max(ahead) <= 20 * BATCH
