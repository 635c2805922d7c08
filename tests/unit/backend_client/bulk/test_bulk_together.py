"""What several coroutines of a data set do together: nothing that was begun on the disk is left behind."""

import asyncio

import pytest

from backend_client.bulk.process import uninterrupted


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_who_is_cancelled_goes_when_the_work_has_ended(cancellations):
    begun, allowed, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        await allowed.wait()
        ended.set()

    caller = asyncio.create_task(uninterrupted(work()))
    await begun.wait()
    for _ in range(cancellations):
        caller.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not caller.done()
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_results_and_errors_are_those_of_the_work():
    async def fails():
        raise OSError(28, "No space left on device")

    assert await uninterrupted(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(OSError, match="No space left"):
        await uninterrupted(fails())


async def test_an_error_after_a_cancellation_does_not_hide_it(caplog):
    begun, allowed = asyncio.Event(), asyncio.Event()

    async def fails():
        begun.set()
        await allowed.wait()
        raise OSError(28, "No space left on device")

    caller = asyncio.create_task(uninterrupted(fails()))
    await begun.wait()
    caller.cancel()
    await asyncio.sleep(0)
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not caplog.records
