"""Requests whose engine dies are run again, within their deadline and a number of runs."""

import asyncio
import itertools
import os
import signal
import socket
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.faults.engines.rerun_model import LIMITS, holding, serving
from tests.faults.engines.test_engine_faults import until
from tests.support.scripted_runner import EATER
from tests.support.waiting import eventually
from worker_node.core.errors import EngineDied, EngineUnavailable, RequestBreaksEngine
from worker_node.core.types import Device
from worker_node.devices.memory import MemoryReader
from worker_node.devices.recovery import listening
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineState
from worker_node.engines.restart import RestartLimits
from worker_node.serving import run


async def test_calls_that_come_while_the_engine_is_started_again_are_answered_too():
    async with holding(load_s=0.3) as model:
        first = asyncio.create_task(model.answer(1, 2))
        await model.kill()
        await until(model.engines[0], EngineState.BACKING_OFF, EngineState.STARTING)
        during = [asyncio.create_task(model.answer(n, n + 1)) for n in range(3, 6)]
        assert await asyncio.gather(first, *during) == [([n, n + 1], Device.CPU) for n in (1, 3, 4, 5)]
        assert model.placements[0].admission.outstanding == 0


SLOW = EngineLimits(restart=RestartLimits(first_backoff_s=30.0), stop_timeout_s=1.0)


@contextmanager
def kernel(model):
    """Yields what sends the model's engines an announcement of the kernel, over a real datagram socket."""
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)

    def recovered():
        for engine in model.engines:
            engine.device_recovered()

    with kernels, listening(ours, recovered):
        yield lambda: kernels.send(b"change@/devices/accel0\0IVPU_PM_EVENT=IVPU_RECOVER\0")


async def test_what_the_engine_holds_when_the_npu_is_recovered_is_run_again():
    async with holding(Device.NPU) as model:
        with kernel(model) as announce:
            answers = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 4)]
            vectors = asyncio.create_task(model.embed([1], [2]))
            await eventually(lambda: model.engines[0].status.in_flight == 4)
            announce()
            await until(model.engines[0], EngineState.BACKING_OFF, EngineState.STARTING)
            model.let_go()
            assert await asyncio.gather(*answers) == [([n, n + 1], Device.NPU) for n in range(1, 4)]
            assert (await vectors).shape[0] == 2
            assert model.engines[0].status.restarts == 1


@pytest.mark.parametrize("recovery", [True, False], ids=["the NPU is recovered", "the engine is killed"])
async def test_after_the_first_token_nothing_is_run_again(recovery):
    async with serving(Device.NPU, step_s=0.01) as model:
        pid = model.engines[0].status.pid
        with kernel(model) as announce, pytest.raises(EngineDied, match="recovered" if recovery else "killed"):
            end = announce if recovery else lambda: os.kill(pid, signal.SIGKILL)
            await model.answer(*range(1, 300), on_first=end)


@pytest.mark.parametrize("recovery", [True, False], ids=["the NPU is recovered", "the engine is killed"])
async def test_a_job_whose_caller_reads_the_counter_is_not_run_again(recovery):
    async with holding(Device.NPU) as model:
        with kernel(model) as announce:
            answer = asyncio.create_task(model.answer(1, 2, own_proof=True))
            if recovery:
                await eventually(lambda: model.engines[0].status.in_flight)
                announce()
            else:
                await model.kill()
            with pytest.raises(EngineDied, match="recovered" if recovery else "killed"):
                await answer


@pytest.mark.parametrize("announce", [True, False], ids=["calls are announced", "they are not"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_was_on_board_of_a_killed_engine_is_run_again_together(tmp_path, announce, number):
    log = tmp_path / "log"
    async with holding(log=str(log), announce=announce, prefill_s=0.3) as model:
        answers = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 41)]
        embeddings = [asyncio.create_task(model.embed([n], [n, n])) for n in range(1, 21)]
        await model.kill(holding=60, number=number)
        await eventually(lambda: log.read_text().count("load") == 2)
        assert not model.placements[0].suspects, "none of them is suspected"
        assert await asyncio.gather(*answers) == [([n, n + 1], Device.CPU) for n in range(1, 41)]
        assert [output.shape[0] for output in await asyncio.gather(*embeddings)] == [2] * 20
        assert model.engines[0].status.restarts == 1
        # Tried one after another they would take a step for each.
        assert len([line for line in log.read_text().splitlines() if line.startswith("step")]) < 20


async def test_a_request_for_which_the_kernel_kills_the_engine_is_refused():
    kills = itertools.count()
    async with serving(memory=MemoryReader(lambda _pid: 0, lambda: next(kills))) as model:
        with pytest.raises(RequestBreaksEngine):
            await model.answer(EATER)


async def test_a_kill_for_memory_long_before_the_end_of_an_engine_is_not_taken_for_its_cause(caplog):
    looks = []

    def oom_kills():
        looks.append(None)
        return min(len(looks), 4)

    async with holding(limits=replace(LIMITS, oom_window_s=0.01), memory=MemoryReader(lambda _: 0, oom_kills)) as model:
        answer = asyncio.create_task(model.answer(1, 2))
        await eventually(lambda: len(looks) >= 6)
        await model.kill()
        assert await answer == ([1, 2], Device.CPU)
        assert not model.placements[0].suspects
    assert "was killed from outside (SIGKILL)" in caplog.text


@pytest.mark.parametrize(("head", "device"), [(False, Device.CPU), (True, Device.NPU)])
async def test_it_is_run_on_the_next_placement_unless_a_streams_head_named_the_device(head, device):
    async with holding(Device.NPU, Device.CPU, limits=LIMITS if head else SLOW) as model:
        answer = asyncio.create_task(model.answer(1, 2, head=head))
        await model.kill()
        assert await answer == ([1, 2], device)
        assert [placement.admission.outstanding for placement in model.placements] == [0, 0]


async def test_a_deadline_that_the_restart_would_outlast_ends_the_call():
    async with holding(limits=SLOW) as model:
        answer = asyncio.create_task(model.answer(1, 2, seconds=20.0))
        await model.kill()
        async with asyncio.timeout(15):
            with pytest.raises(EngineDied) as caught:
                await answer
        assert caught.value.retry_after is not None


@pytest.mark.parametrize("end", ["cancelled", "stopped"])
async def test_a_call_that_waits_for_a_restart_ends_when_its_caller_leaves_or_the_node_stops(end):
    async with holding(limits=SLOW) as model:
        answer = asyncio.create_task(model.answer(1, 2))
        await model.kill()
        await until(model.engines[0], EngineState.BACKING_OFF)
        before = len(asyncio.all_tasks())
        if end == "cancelled":
            answer.cancel()
        else:
            await model.engines[0].stop()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError if end == "cancelled" else EngineUnavailable):
                await answer
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) < before, "nothing waits any more"


async def test_a_request_whose_engines_keep_dying_is_given_up_after_the_most_runs(monkeypatch):
    monkeypatch.setattr(run, "MAX_RUNS", 4)
    async with holding() as model:
        # Another request is on board each time, so that nothing tells which of them is to blame.
        answers = [asyncio.create_task(model.answer(n, n)) for n in (1, 2)]

        async def kill_for_ever():
            while True:
                await model.kill(let_go=False)
                await asyncio.sleep(0.05)

        killer = asyncio.create_task(kill_for_ever())
        async with asyncio.timeout(60):
            results = await asyncio.gather(*answers, return_exceptions=True)
        killer.cancel()
        assert all(isinstance(result, EngineUnavailable | RequestBreaksEngine) for result in results), results
        assert model.engines[0].status.restarts <= 2 * 4
