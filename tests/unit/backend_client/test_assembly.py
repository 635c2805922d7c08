"""The only place where vectors are joined takes vectors of one space."""

import asyncio

import numpy as np
import pytest

from backend_client import NPUUnavailableError, RequestRejected
from backend_client.embed_many import Assembly, OneSpace, embed_in_batches, embed_windowed
from backend_client.errors import BatchFailure, EmbedManyFailed, VectorSpaceMismatch
from backend_client.lifetime import Deadline, OpenCalls
from backend_client.options import BatchOptions
from backend_client.results import EmbedBatch, Usage


def part(rows, space="s", value=1.0, dimensions=3, node="http://n:1"):
    return EmbedBatch(
        source="npu",
        node=node,
        model="m",
        device="CPU",
        request_id="req_1",
        vectors=np.full((rows, dimensions), value, np.float32),
        space=space,
        usage=Usage(rows),
    )


@pytest.mark.parametrize("other", [part(2, space="other"), part(2, dimensions=4)], ids=["space", "dimensions"])
def test_a_part_that_cannot_be_compared_is_refused_and_changes_nothing(other):
    rows = Assembly()
    rows.put(0, part(2))
    with pytest.raises(VectorSpaceMismatch):
        rows.put(2, other)
    error = rows.failure(4, [BatchFailure(2, 4, RequestRejected("no"))])
    assert isinstance(error, EmbedManyFailed)
    assert error.space == "s"
    np.testing.assert_array_equal(np.isnan(error.vectors[:, 0]), [False, False, True, True])


def test_parts_come_in_any_order():
    rows = Assembly()
    rows.put(3, part(2, value=3.0))
    rows.put(0, part(1, value=1.0, node="http://n:2"))
    rows.put(1, part(2, value=2.0))
    result = rows.result(5)
    assert result.vectors[:, 0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert (result.space, result.usage, result.served) == ("s", Usage(5), {"http://n:1": 4, "http://n:2": 1})
    assert result.vectors.flags.writeable


def test_no_texts_have_no_space():
    result = Assembly().result(0)
    assert (result.vectors.shape, result.space) == ((0, 0), None)


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


class Stop(Exception):
    """What a caller's progress function raises."""


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


async def test_what_progress_raises_reaches_the_caller_as_it_is_and_ends_the_rest():
    raised = Stop("enough")
    ended = []

    async def embed(texts):
        try:
            if ended or len(running) >= 2:
                await asyncio.get_running_loop().create_future()
            running.append(texts)
            return part(len(texts))
        except asyncio.CancelledError:
            ended.append(texts)
            raise

    running = []
    calls = OpenCalls()

    def progress(done, total):
        assert total == 20
        if done >= 4:
            raise raised

    with pytest.raises(Stop) as caught:
        await embed_in_batches(
            ["x"] * 20, embed, options=OPTIONS, concurrency=4, probing=2, calls=calls, progress=progress
        )
    assert caught.value is raised
    await calls.close()
    assert len(asyncio.all_tasks()) == 1


def test_one_space_admits_what_can_be_compared():
    one = OneSpace()
    assert one.admit(part(1)).space == one.admit(part(9)).space == one.space == "s"
