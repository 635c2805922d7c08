"""The cache of results: each made once, and dropped when nobody waits or the space is used up."""

import asyncio

import pytest

from worker_node.core.errors import EngineUnavailable, UnsupportedParameter
from worker_node.sandbox.pool import ResultCache


class Maker:
    """Makes results when told to."""

    def __init__(self):
        self.calls = 0
        self.go = asyncio.Event()
        self.cancelled = False

    async def __call__(self):
        self.calls += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "result"


async def started(cache, make, key=b"key"):
    task = asyncio.create_task(cache.get(key, make))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_requests_at_the_same_time_share_one_call():
    cache, make = ResultCache(10_000), Maker()
    tasks = [await started(cache, make) for _ in range(3)]
    tasks[0].cancel()
    make.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[1:] == ["result", "result"]
    assert await cache.get(b"key", make) == "result"
    assert make.calls == 1


async def test_a_call_is_cancelled_when_the_last_request_leaves():
    cache, make = ResultCache(10_000), Maker()
    task = await started(cache, make)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert make.cancelled
    make.go.set()
    assert await cache.get(b"key", make) == "result"


async def test_a_refusal_is_kept_and_raised_anew():
    calls = 0

    async def refuse():
        nonlocal calls
        calls += 1
        raise UnsupportedParameter("schema: no", param="schema")

    cache = ResultCache(10_000)
    errors = []
    for _ in range(2):
        with pytest.raises(UnsupportedParameter) as refusal:
            await cache.get(b"key", refuse)
        errors.append(refusal.value)
    assert calls == 1
    assert errors[0] is not errors[1]
    assert errors[1].param == "schema"


async def test_what_may_succeed_later_is_not_kept():
    async def fail():
        raise EngineUnavailable("later")

    async def succeed():
        return "result"

    cache = ResultCache(10_000)
    with pytest.raises(EngineUnavailable):
        await cache.get(b"key", fail)
    assert await cache.get(b"key", succeed) == "result"


async def test_the_least_recently_used_result_goes_first():
    made = []

    def maker(name):
        async def make():
            made.append(name)
            return "x" * 1000

        return make

    cache = ResultCache(2500)
    for name in ("a", "b", "a", "c", "a", "b"):
        await cache.get(name.encode(), maker(name))
    assert made == ["a", "b", "c", "b"]
