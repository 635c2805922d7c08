"""Supervised background tasks, in virtual time."""

import asyncio
import itertools
import logging

import pytest

from backend_client.lifetime import supervise
from tests.unit.backend_client.virtual_time import in_virtual_time, now


async def fails():
    raise ValueError("the secret prompt")


async def returns():
    pass


async def is_cancelled_from_inside():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("end", [fails, returns, is_cancelled_from_inside])
@in_virtual_time
async def test_a_task_that_ends_is_logged_and_restarted_after_a_second(end, caplog):
    starts = []

    async def work():
        starts.append(now())
        await end()

    with caplog.at_level(logging.ERROR):
        task = supervise(work, "probe of node 1")
        await asyncio.sleep(59.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([1.0] * 59)
    own = [record for record in caplog.records if record.name.startswith("backend_client.")]
    assert len(own) == len(starts)
    assert "probe of node 1" in caplog.text
    assert "secret" not in caplog.text
