"""The lock on real files, held by this process, another open file, and a process that dies."""

import asyncio
import fcntl
import subprocess
import sys

import pytest

from worker_node.bounded.settings import DeviceLock
from worker_node.core.errors import EngineUnavailable


async def test_two_jobs_never_hold_it_at_once_and_take_turns(tmp_path):
    lock = DeviceLock(tmp_path / "lock", 10)
    order = []

    async def job(name):
        async with lock.held():
            order.append(("in", name))
            await asyncio.sleep(0)
            order.append(("out", name))

    await asyncio.gather(*(job(name) for name in range(5)))
    assert order == [(step, name) for name in range(5) for step in ("in", "out")]


async def test_another_holder_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        entered = asyncio.Event()

        async def job():
            async with DeviceLock(path, 30).held():
                entered.set()

        task = asyncio.create_task(job())
        await asyncio.sleep(0)
        assert not entered.is_set()
        fcntl.flock(other, fcntl.LOCK_UN)
        await task
        assert entered.is_set()


async def test_waiting_is_bounded_for_other_processes_and_for_our_own_jobs(tmp_path):
    path = tmp_path / "lock"
    lock = DeviceLock(path, 0.05)
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EngineUnavailable, match=r"busy with other jobs for 0\.05 s") as caught:
            async with lock.held():
                pass
    assert caught.value.status == 503
    async with lock.held():
        with pytest.raises(EngineUnavailable):
            async with lock.held():
                pass
    async with lock.held():
        pass


async def test_a_failure_and_a_cancellation_give_it_back(tmp_path):
    lock = DeviceLock(tmp_path / "lock", 10)
    with pytest.raises(ZeroDivisionError):
        async with lock.held():
            raise ZeroDivisionError
    waiting = asyncio.Event()

    async def job():
        async with lock.held():
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(job())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with lock.held():
        pass


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    script = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1, flush=True); input()"
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


async def test_the_lock_of_a_dead_process_is_free(tmp_path, holder):
    with pytest.raises(EngineUnavailable):
        async with DeviceLock(tmp_path / "lock", 0.05).held():
            pass
    holder.kill()
    async with DeviceLock(tmp_path / "lock", 10).held():
        pass


async def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(EngineUnavailable, match="OV_GENAI_NPU_LOCK"):
        async with DeviceLock(tmp_path / "nothing" / "lock", 1).held():
            pass
