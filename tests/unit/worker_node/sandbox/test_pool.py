"""Calls in killable processes: bounded, and nobody but the culprit is refused; their results are made once."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.waiting import eventually
from tests.unit.worker_node.sandbox import prepared
from worker_node.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineUnavailable,
    InternalError,
    Overloaded,
    UnsupportedParameter,
)
from worker_node.sandbox.pool import PreparationLimits, PreparationPool, ResultCache

pytestmark = pytest.mark.slow


@pytest.fixture
async def pool():
    pool = PreparationPool(PreparationLimits(cpu_s=0.5, queue=1), ["tests.unit.worker_node.sandbox.prepared"])
    yield pool
    await pool.close()
    assert not pool.pids


def run(pool, function, *arguments, seconds=60.0):
    return pool.run(function, *arguments, deadline=time.monotonic() + seconds, param="schema")


async def until_written(path):
    await eventually(lambda: path.exists() and path.read_text())
    return int(path.read_text())


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (prepared.spin, "CPU time"),
        (prepared.take_memory, "memory"),
        (prepared.crash, "crashed"),
    ],
)
async def test_a_call_over_a_bound_is_refused_and_the_next_one_runs(pool, function, bound):
    with pytest.raises(BadRequest, match=bound):
        await run(pool, function)
    assert await run(pool, prepared.echo, 1) == 1


async def test_a_process_that_does_not_start_is_told_with_the_reason(pool, monkeypatch):
    def start_module(*_):
        raise ConnectionError("it ended with status 1")

    monkeypatch.setattr("worker_node.sandbox.pool.start_module", start_module)
    with pytest.raises(EngineUnavailable, match="could not be started: it ended with status 1"):
        await run(pool, prepared.echo, 1)


async def test_a_bug_is_an_internal_error_and_its_text_is_not_logged(pool, caplog):
    with pytest.raises(InternalError):
        await run(pool, prepared.fail, "secret text")
    assert "prepared.py" in caplog.text
    assert "secret text" not in caplog.text
    assert await run(pool, prepared.echo, 1) == 1


async def test_a_process_that_was_killed_while_idle_harms_no_call(pool):
    await run(pool, prepared.echo, 1)
    (pid,) = pool.pids
    psutil.Process(pid).kill()
    assert await run(pool, prepared.echo, 2) == 2


async def test_a_call_whose_process_is_killed_is_run_once_more_and_may_be_sent_again(pool, tmp_path):
    path = tmp_path / "running"
    call = asyncio.create_task(run(pool, prepared.hang, str(path)))
    for _ in range(2):
        pid = await until_written(path)
        path.unlink()
        psutil.Process(pid).kill()
    with pytest.raises(EngineUnavailable, match="was killed; the request can be sent again"):
        await call


async def test_the_queue_is_bounded_and_a_call_in_it_has_a_deadline(pool, tmp_path):
    running = asyncio.create_task(run(pool, prepared.hang, str(tmp_path / "running")))
    await until_written(tmp_path / "running")
    waiting = asyncio.create_task(run(pool, prepared.echo, 1))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await run(pool, prepared.echo, 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(DeadlineExceeded):
        await run(pool, prepared.echo, 3, seconds=0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_call_that_waits_for_too_long_may_be_sent_again(tmp_path):
    # The call never ends by itself, so a short limit only makes the test quick.
    pool = PreparationPool(PreparationLimits(wall_s=0.05), ["tests.unit.worker_node.sandbox.prepared"])
    try:
        with pytest.raises(EngineUnavailable):
            await run(pool, prepared.hang, str(tmp_path / "running"))
    finally:
        await pool.close()


async def test_closing_ends_the_calls_in_flight(pool, tmp_path):
    running = asyncio.create_task(run(pool, prepared.hang, str(tmp_path / "running")))
    await until_written(tmp_path / "running")
    await pool.close()
    with pytest.raises(EngineUnavailable):
        await running


PARENT = """
import asyncio, time
from tests.unit.worker_node.sandbox import prepared
from worker_node.sandbox.pool import PreparationLimits, PreparationPool

async def main():
    pool = PreparationPool(PreparationLimits())
    await pool.run(prepared.echo, 1, deadline=time.monotonic() + 60, param="schema")
    print(*pool.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_process_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive


async def test_requests_at_the_same_time_share_one_call():
    cache, calls, go = ResultCache(10_000), [], asyncio.Event()

    async def make():
        calls.append(1)
        await go.wait()
        return "result"

    tasks = [asyncio.create_task(cache.get(b"key", make)) for _ in range(3)]
    await eventually(lambda: calls)
    tasks[0].cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[1:] == ["result", "result"]
    assert await cache.get(b"key", make) == "result"
    assert len(calls) == 1


async def test_a_refusal_is_kept_and_raised_anew():
    calls = []

    async def refuse():
        calls.append(1)
        raise UnsupportedParameter("schema: no", param="schema")

    cache = ResultCache(10_000)
    errors = []
    for _ in range(2):
        with pytest.raises(UnsupportedParameter) as refusal:
            await cache.get(b"key", refuse)
        errors.append(refusal.value)
    assert len(calls) == 1
    assert errors[0] is not errors[1]
    assert errors[1].param == "schema"


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
