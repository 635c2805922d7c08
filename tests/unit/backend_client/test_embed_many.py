"""`embed_many`: what fails, what comes out, and that vectors of two spaces are never joined."""

import asyncio

import numpy as np
import pytest

from backend_client import NPUUnavailableError
from backend_client.embed_many import embed_in_batches, embed_windowed
from backend_client.errors import (
    AuthenticationFailed,
    EmbedManyFailed,
    EmbedManyUnavailable,
    ModelMissing,
    ModelNotFound,
    VectorSpaceMismatch,
)
from backend_client.lifetime import Deadline, OpenCalls
from backend_client.options import BatchOptions
from backend_client.results import EmbedBatch, Usage
from tests.unit.backend_client.fakes import with_fleet


@with_fleet(2)
async def test_a_fleet_that_dies_on_the_way_is_unavailable_and_keeps_what_was_done(nodes, client):
    def progress(done, _):
        if done >= 640:
            for node in nodes:
                node.die()

    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed_many(["text"] * 20_000, progress=progress)
    assert isinstance(caught.value, EmbedManyUnavailable)
    assert isinstance(caught.value, EmbedManyFailed)
    done = ~np.isnan(caught.value.vectors).any(axis=1)
    assert 640 <= done.sum() < 20_000
    for failure in caught.value.failures:
        assert not done[failure.start : failure.stop].any()


@with_fleet(3)
async def test_a_wrong_key_costs_one_request_per_node_for_any_number_of_texts(nodes, client):
    for node in nodes:
        node.embed = AuthenticationFailed("wrong key", node=node.url, status=401)
    with pytest.raises(AuthenticationFailed):
        await client.embed_many(["text"] * 20_000)
    assert all(len(node.requests) <= 1 for node in nodes)


@with_fleet(3)
async def test_a_model_that_no_node_has_costs_few_requests_for_any_number_of_texts(nodes, client):
    for node in nodes:
        node.embed = ModelMissing("no such model", node=node.url, status=404)
    with pytest.raises(NPUUnavailableError) as caught:
        await client.embed_many(["text"] * 20_000, model="misspelt")
    assert type(caught.value) is ModelNotFound
    # Batches are started one for each node.
    assert all(len(node.requests) <= 3 for node in nodes)


@with_fleet(1)
async def test_an_exception_from_outside_the_package_ends_everything_unchanged(nodes, client):
    [node] = nodes

    async def fails_for_b(call):
        if b'"b"' in call.body:
            raise AssertionError("not a failure that the client knows")
        return await node.vectors(call)

    node.embed = fails_for_b
    with pytest.raises(AssertionError):
        await client.embed_many(["a"] * 64 + ["b"] * 64)


@with_fleet(2)
async def test_all_batches_run_at_once_after_the_first_successes(nodes, client):
    most = 0

    async def counting(call):
        nonlocal most
        most = max(most, sum(status.in_flight for status in client.status()))
        await asyncio.sleep(0.05)
        return await nodes[0].vectors(call)

    for node in nodes:
        node.embed = counting
    await client.embed_many(["text"] * 64 * 20)
    assert most == client.fleet.concurrency()


def part(rows, space="s", value=1.0, dimensions=3, node="http://n:1"):
    return EmbedBatch(
        source="node",
        node=node,
        model="m",
        device="CPU",
        request_id="req_1",
        vectors=np.full((rows, dimensions), value, np.float32),
        space=space,
        usage=Usage(rows),
    )


class Mixing:
    """A backend that breaks its promise: from the third batch on it answers in another space."""

    def __init__(self):
        self.calls = 0

    async def __call__(self, texts):
        self.calls += 1
        return part(len(texts), space="s" if self.calls < 3 else "other")


OPTIONS = BatchOptions(texts=2)


async def test_a_backend_that_mixes_spaces_cannot_make_a_result_of_two():
    with pytest.raises(NPUUnavailableError) as caught:
        await embed_in_batches(["x"] * 10, Mixing(), options=OPTIONS, concurrency=2, probing=1, calls=OpenCalls())
    assert caught.value.space == "s"
    assert np.isnan(caught.value.vectors[:, 0]).sum() == 6
    assert all(isinstance(failure.error, VectorSpaceMismatch) for failure in caught.value.failures)


async def test_a_stream_of_batches_has_one_space():
    async def texts():
        for _ in range(10):
            yield "x"

    seen = []
    with pytest.raises(VectorSpaceMismatch):
        async for batch in embed_windowed(texts(), Mixing(), options=OPTIONS, window=1, calls=OpenCalls()):
            seen.append(batch.space)  # noqa: PERF401  (what came before the error counts)
    assert seen == ["s", "s"]


async def test_a_stream_whose_first_batch_is_late_has_no_more_than_its_window_in_memory():
    begun, late = 0, asyncio.Event()

    async def embed(texts):
        nonlocal begun
        begun += 1
        if begun == 1:
            await late.wait()
        return part(len(texts))

    batches = embed_windowed(["x"] * 40, embed, options=OPTIONS, window=4, calls=OpenCalls())
    first = asyncio.create_task(anext(batches))
    for _ in range(200):
        await asyncio.sleep(0)
    assert begun == 4
    late.set()
    assert len((await first).vectors) == 2
    await batches.aclose()


@pytest.mark.parametrize(("make", "stop"), [(list, 10), (iter, 2)])
async def test_texts_that_are_unread_at_the_deadline_are_one_failure(make, stop):
    now = 0.0

    async def embed(texts):
        nonlocal now
        now = 9.0
        return part(len(texts))

    with pytest.raises(EmbedManyFailed, match=r"the call's time was up after 2 texts had been read") as caught:
        await embed_in_batches(
            make(["x"] * 10), embed, options=OPTIONS, concurrency=1, probing=1, calls=OpenCalls(),
            until=Deadline(5.0, lambda: now),
        )  # fmt: skip
    [failure] = caught.value.failures
    assert (failure.start, failure.stop) == (2, stop)
    assert np.isnan(caught.value.vectors[:, 0]).tolist() == [False] * 2 + [True] * (stop - 2)
