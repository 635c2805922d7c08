"""What happens to callers when an engine process crashes, hangs, or cannot load: scripted faults in real processes."""

import asyncio
import errno
import os
import signal
import time
from contextlib import aclosing, asynccontextmanager

import msgspec
import numpy as np
import psutil
import pytest

from tests.support.later import Later
from tests.support.scripted_runner import HANG, POISON, RAISE, RUNNER, STALL
from tests.support.waiting import eventually
from worker_node.core.environment import native_environment, tool_environment
from worker_node.core.errors import EngineDied, EngineUnavailable, Retryable
from worker_node.core.operating_system import start_module
from worker_node.core.types import Device, ModelKind
from worker_node.encoders.jobs import row_job
from worker_node.engines import process as engine_processes
from worker_node.engines.process import EngineLimits, EngineProcess
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.restart import GrowthLimits, RestartLimits
from worker_node.engines.supervisor import Engine
from worker_node.engines.watchdog import LivenessLimits
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

QUICK = RestartLimits(first_backoff_s=0.05, max_backoff_s=0.2)
# An engine beats once a second: one that a busy machine does not run for two seconds more is no hang.
HANG_S = 4.0
FAR = 1e12


async def no_canary(_engine):
    pass


@asynccontextmanager
async def running(canary=no_canary, limits=None, nice=0, device=Device.CPU, prewarm=None, proven_with=None, **options):
    limits = limits or EngineLimits(liveness=LivenessLimits(20.0), restart=QUICK)
    spec = EngineSpec("scripted", ModelKind.GENERATION, "/", device, RUNNER, options, nice=nice)
    engine = Engine(spec, canary, limits, prewarm=prewarm, proven_with=proven_with)
    engine.wake()
    try:
        yield engine
    finally:
        await engine.stop()


async def until(engine, *states):
    # As long as a test may take: on a machine that is busy elsewhere a process starts in half a minute.
    async with asyncio.timeout(100):
        while engine.status.state not in states:
            await asyncio.sleep(0.01)
    return engine.status


class Examiner:
    """A canary that asks a question, and remembers whom."""

    def __init__(self):
        self.examined = []

    async def __call__(self, process):
        self.examined.append(process.pid)
        await collect(process, 1)


def job(*tokens, deadline=FAR):
    return GenerateJob(0, np.asarray(tokens, "<i4").tobytes(), max_new_tokens=100, deadline=deadline)


async def collect(engine, *tokens, deadline=FAR):
    async with aclosing(engine.run(job(*tokens, deadline=deadline), TokenDelta)) as deltas:
        return [token async for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize("when", ["while it serves", "while it is idle", "while it loads"])
async def test_kills_from_outside_fail_what_it_held_at_once_and_never_quarantine(when, tmp_path):
    order = tmp_path / "order"
    order.write_text("compute" if when == "while it loads" else "")
    async with running(step_s=0.01, on_load=str(order)) as engine:
        for count in range(1, 5):
            if when == "while it loads":
                await eventually(lambda count=count: engine.status.pid and engine.status.restarts == count - 1)
            else:
                await until(engine, EngineState.READY)
            jobs = 8 if when == "while it serves" else 0
            waiting = [asyncio.create_task(collect(engine, *range(1, 400))) for _ in range(jobs)]
            await asyncio.sleep(0)
            os.kill(engine.status.pid, signal.SIGKILL)
            for lost in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(lost, EngineUnavailable)
                assert "from outside" in lost.message
                assert lost.retry_after
            await eventually(lambda count=count: engine.status.restarts == count)
            status = await until(engine, EngineState.BACKING_OFF, EngineState.QUARANTINED)
            assert status.state is EngineState.BACKING_OFF
            assert "killed from outside (SIGKILL)" in status.reason
        order.write_text("")
        assert (await until(engine, EngineState.READY)).restarts == 4
        assert await collect(engine, 1, 2) == [1, 2]


async def test_a_hang_is_found_by_the_watchdog_and_the_engine_replaced():
    limits = EngineLimits(liveness=LivenessLimits(HANG_S), restart=QUICK)
    async with running(limits=limits) as engine:
        before = await until(engine, EngineState.READY)
        # The job has no deadline of its own, so that only the watchdog can end it. When it does is measured with a
        # clock that jumps (tests/unit/worker_node/engines/test_watchdog.py); here it is only bounded, generously.
        async with asyncio.timeout(30):
            with pytest.raises(EngineUnavailable, match="hung") as caught:
                await collect(engine, HANG)
        assert isinstance(caught.value, Retryable)
        assert caught.value.retry_after > 0
        after = await until(engine, EngineState.READY)
        assert after.pid != before.pid
        assert not psutil.pid_exists(before.pid)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch):
    spawn = EngineProcess.spawn
    failures = iter([OSError(errno.EAGAIN, "no process to be had")])

    async def scarce(*wanted):
        if error := next(failures, None):
            raise error
        return await spawn(*wanted)

    monkeypatch.setattr(EngineProcess, "spawn", scarce)
    async with running() as engine:
        assert (await until(engine, EngineState.READY)).restarts == 1


async def test_an_engine_that_is_stopped_while_its_process_starts_leaves_none(monkeypatch):
    start, processes, begun = engine_processes.start_module, [], asyncio.Event()

    def noted(module):
        started, link = start(module)
        processes.append(started)
        begun.set()
        return started, link

    monkeypatch.setattr(engine_processes, "start_module", noted)
    async with running():
        await begun.wait()
    assert [started.poll() is not None for started in processes] == [True]


async def test_a_load_that_takes_too_long_is_ended():
    limits = EngineLimits(load_timeout_s=0.3, restart=RestartLimits(first_backoff_s=30))
    async with running(limits=limits, load_s=3600) as engine:
        status = await until(engine, EngineState.BACKING_OFF)
        assert "did not load within" in status.reason


async def test_the_log_tells_that_a_model_still_loads_and_what_is_normal(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "worker_node.engines.process")
    monkeypatch.setattr("worker_node.engines.process._LOADING_REPORT_S", 0.01)
    order = tmp_path / "order"
    order.write_text("wait")
    async with running(limits=EngineLimits(), device=Device.NPU, on_load=str(order)) as engine:
        told = "scripted on NPU has been loading for 0 s, and may for 1800 s (load_timeout_s)"
        await eventually(lambda: told in caplog.text)
        assert "a first compile for an NPU takes minutes" in caplog.text
        order.write_text("")
        await until(engine, EngineState.READY)


async def test_an_idle_engine_that_does_not_answer_its_canary_is_replaced():
    examined = []

    async def canary(process):
        examined.append(process.pid)
        hangs = len(examined) == 2
        await collect(process, *([STALL] if hangs else [1]), deadline=time.monotonic() + (0.1 if hangs else 60))

    limits = EngineLimits(canary_interval_s=0.05, restart=QUICK)
    async with running(canary=canary, limits=limits) as engine:
        first = await until(engine, EngineState.READY)
        await eventually(lambda: engine.status.restarts)
        assert "its known question got no answer" in engine.status.reason
        assert engine.status.wrong == 0, "it gave no wrong answer"
        assert (await until(engine, EngineState.READY)).pid != first.pid


@pytest.mark.parametrize("event", ["recovery of its device", "sleep of the machine"])
async def test_an_idle_engine_is_examined_after_a(event, monkeypatch):
    """In a sleep its own clocks stood still: no deadline has passed, and no watchdog counts it."""
    slept, canary = [0.0], Examiner()
    monkeypatch.setattr("worker_node.engines.supervisor.since_boot", lambda: time.monotonic() + slept[0])
    limits = EngineLimits(canary_interval_s=3000.0, restart=QUICK, growth=GrowthLimits(growth=2**40, look_s=0.05))
    async with running(canary=canary, limits=limits) as engine:
        first = await until(engine, EngineState.READY)
        if event == "sleep of the machine":
            slept[0] = 3600.0
        else:
            engine.device_recovered()
        await eventually(lambda: len(canary.examined) >= 2)
        assert set(canary.examined) == {first.pid}
        assert engine.ready


async def test_an_engine_with_work_is_replaced_after_a_recovery_of_its_device():
    canary = Examiner()
    async with running(canary=canary, limits=EngineLimits(canary_interval_s=300.0, restart=QUICK)) as engine:
        first = await until(engine, EngineState.READY)
        request = asyncio.create_task(collect(engine, STALL))
        await asyncio.sleep(0)
        engine.device_recovered()
        with pytest.raises(EngineDied, match="the kernel recovered the NPU"):
            await request
        await until(engine, EngineState.BACKING_OFF, EngineState.STARTING)
        assert (await until(engine, EngineState.READY)).pid != first.pid
        assert len(set(canary.examined)) == 2


async def test_a_canary_that_had_no_turn_behind_requests_is_put_off():
    examined, request = [], []

    async def canary(process):
        examined.append(process.pid)
        if len(examined) == 2:
            # Requests came in when it was about to begin, and take their time; it is not answered in its own.
            request.append(asyncio.create_task(collect(engine, *range(1, 60))))
            await asyncio.sleep(0)
            await collect(process, STALL, deadline=time.monotonic() + 0.1)

    limits = EngineLimits(canary_interval_s=0.05, restart=QUICK)
    async with running(canary=canary, limits=limits, step_s=0.01) as engine:
        first = await until(engine, EngineState.READY)
        await eventually(lambda: request)
        assert len(await request[0]) == 59
        await eventually(lambda: len(examined) >= 3)
        assert (engine.status.pid, engine.status.restarts) == (first.pid, 0)


async def test_an_error_in_a_step_is_the_reason_of_the_engines_end_without_its_words(capfd):
    async with running() as engine:
        await until(engine, EngineState.READY)
        with pytest.raises(EngineUnavailable, match=r"an error of its own \(TypeError") as lost:
            await collect(engine, RAISE, 471147)
        logged = capfd.readouterr().err
        assert "_begin" in logged, "it says where"
        assert "471147" not in logged + str(lost.value)
        await until(engine, EngineState.BACKING_OFF, EngineState.STARTING, EngineState.READY)
        await until(engine, EngineState.READY)
        assert await collect(engine, 1, 2) == [1, 2]


async def test_options_that_an_engine_cannot_read_are_a_failed_load_and_no_crash():
    async with running(unreadable=True) as engine:
        status = await until(engine, EngineState.FAILED)
        assert "cannot be loaded: ValueError: an option cannot be read" in status.reason
        assert status.restarts == 0


static = Later("worker_node.encoders.static")


def test_a_text_that_no_bucket_holds_fails_alone():
    spec = EngineSpec("m", "embedding", "/", Device.NPU, "", {"npu_buckets": [16, 32]}, emulated=True)
    runner, events = static.StaticEncoder(spec), []
    for number, lengths in ((1, [33]), (2, [5, 40])):
        runner.submit(msgspec.structs.replace(row_job([[7] * length for length in lengths], 1e12), id=number))
    assert runner.has_work
    runner.step(events.append, lambda: None)
    assert [(event.id, event.code) for event in events] == [(number, "context_length_exceeded") for number in (1, 2)]
    assert not runner.has_work
    runner.close()


SECRET = "c0ffee-secret"
SECRETS = ("NPU_NODE_API_KEYS", "OTEL_EXPORTER_OTLP_HEADERS", "HF_TOKEN", "DATABASE_URL", "OPENAI_API_KEY")


async def test_an_engine_inherits_no_secret(monkeypatch):
    # What /proc shows of the environment is what an interpreter was started with.
    monkeypatch.setattr("worker_node.engines.process.start_module", start_module)
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OPENVINO_LOG_LEVEL", "1")
    async with running() as engine:
        status = await until(engine, EngineState.READY)
        environment = psutil.Process(status.pid).environ()
    assert SECRET not in str(environment)
    assert environment["OPENVINO_LOG_LEVEL"] == "1"
    assert environment["PATH"]


@pytest.mark.linux
async def test_every_thread_of_an_engine_has_a_lower_priority_than_the_edge():
    async with running(nice=7) as engine:
        status = await until(engine, EngineState.READY)
        lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        threads = psutil.Process(status.pid).threads()
        assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in threads} == {lowered}


def test_a_tool_keeps_its_own_variables_and_gets_none_of_the_nodes():
    own = {"PIP_INDEX_URL": "https://user:password@index", "NPU_NODE_API_KEYS": SECRET, "HTTPS_PROXY": "p"}
    assert tool_environment(own) == {"PIP_INDEX_URL": "https://user:password@index", "HTTPS_PROXY": "p"}
    assert native_environment(own) == {}


async def test_an_engine_serves_while_its_prefix_cache_is_filled():
    filled, go_on = [], asyncio.Event()

    async def prewarm(process):
        await go_on.wait()
        filled.append(await collect(process, 5, 6))

    async with running(prewarm=prewarm) as engine:
        status = await until(engine, EngineState.READY)
        assert (status.prewarm, filled) == ("running", [])
        assert await collect(engine, 1, 2) == [1, 2]
        go_on.set()
        await eventually(lambda: engine.status.prewarm == "done")
        assert filled == [[5, 6]]
        os.kill(engine.status.pid, signal.SIGKILL)
        await eventually(lambda: len(filled) == 2)


async def test_an_engine_that_ends_while_its_prefix_cache_is_filled_serves_without():
    begun = []

    async def prewarm(process):
        begun.append(process.pid)
        await collect(process, POISON)

    async with running(prewarm=prewarm) as engine:
        await eventually(lambda: engine.status.restarts == 2 and engine.ready)
        assert await collect(engine, 1, 2) == [1, 2]
        assert len(set(begun)) == 2
        assert engine.status.prewarm == "failed"


async def test_what_cannot_be_computed_ahead_ends_no_engine():
    async def prewarm(process):
        await collect(process, 1, deadline=0)

    async with running(prewarm=prewarm) as engine:
        await eventually(lambda: engine.status.prewarm == "failed")
        assert engine.status.restarts == 0
        assert await collect(engine, 1, 2) == [1, 2]
