"""Errors of Python's own in an engine process: they have a reason and quote no request."""

import msgspec
import pytest

from tests.faults.engines.test_engine_faults import collect, running, until
from tests.support.later import Later
from tests.support.scripted_runner import RAISE
from worker_node.core.errors import EngineUnavailable
from worker_node.core.types import Device
from worker_node.encoders.jobs import row_job
from worker_node.engines.protocol import EngineSpec, EngineState

static = Later("worker_node.encoders.static")


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


def test_a_text_that_no_bucket_holds_fails_alone():
    spec = EngineSpec("m", "embedding", "/", Device.NPU, "", {"npu_buckets": [16, 32]}, emulated=True)
    runner, events = static.StaticEncoder(spec), []
    for number, lengths in ((1, [33]), (2, [5, 40])):
        runner.submit(msgspec.structs.replace(row_job([[7] * length for length in lengths], 1e12), id=number))
    assert runner.has_work
    runner.step(events.append, lambda: None)
    assert [(event.id, event.code) for event in events] == [(number, "context_length_exceeded") for number in (1, 2)]
    assert not runner.has_work
