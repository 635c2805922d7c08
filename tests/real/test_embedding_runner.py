"""The embedding runner by itself: a text that comes alone has a copy of the model to itself, many share the streams."""

import multiprocessing
import os
import select
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import openvino as ov
import pytest

from worker_node.core.types import Device, ModelKind
from worker_node.encoders.dynamic import DynamicEncoder
from worker_node.encoders.jobs import RowJob
from worker_node.engines.protocol import VECTOR_DTYPE, EngineSpec, Outcome

pytestmark = pytest.mark.real

SHORT, LONG = [101, 7592, 102], [101, *range(2000, 2060), 102]


def job(number, rows):
    flat = np.concatenate([np.asarray(row, "<i4") for row in rows]).tobytes()
    return RowJob(number, flat, [len(row) for row in rows], time.monotonic() + 60)


def parts(event):
    return event.parts() if isinstance(event, Outcome) else ()


def embed(runner, *jobs):
    for each in jobs:
        runner.submit(each)
    done = {}
    while len(done) < len(jobs):
        if not runner.has_work:
            assert select.select([runner.wake_fd], [], [], 30)[0], "the device never finished"
        runner.step(lambda event: done.update((part.id, part) for part in parts(event)), lambda: None)
    return np.concatenate([np.frombuffer(done[each.id].data, VECTOR_DTYPE).reshape(-1, 384) for each in jobs])


def _runs(path, options):
    """(streams, tokens of each text) of the runs of a short text alone, and of those of a short and a long one."""
    spec = EngineSpec("all-minilm-l6-v2", ModelKind.EMBEDDING, str(path), Device.CPU, "embedding", options)
    runner, ran = DynamicEncoder(spec), []
    start = runner._start

    def noting(slot):
        streams = slot.request.get_compiled_model().get_property("NUM_STREAMS")
        ran.append((streams, slot.tokens // len(slot.batch)))
        start(slot)

    runner._start = noting
    runner.load()
    try:
        embed(runner, job(1, [SHORT]))
        alone, ran[:] = ran.copy(), []
        embed(runner, job(2, [SHORT]), job(3, [LONG]))
        return alone, ran
    finally:
        runner.close()


@pytest.mark.parametrize("precision", ["f32", None])
def test_lengths_are_rounded_up_to_more_where_the_device_computes_in_half_precision(store, precision):
    halves = precision is None and "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    options = {"context_limit": 512} | ({"precision": precision} if precision else {})
    alone, together = _runs(store.get("all-minilm-l6-v2").path, options)
    assert {length for _, length in alone + together} == ({16, 64} if halves else {8, 64})


def test_only_a_text_that_comes_alone_runs_on_the_copy_with_one_stream(store):
    # In a process of its own, with up to four cores: a worker of the suite is kept to one, with one copy only.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(min(4, os.cpu_count())))
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            path = store.get("all-minilm-l6-v2").path
            alone, together = process.submit(_runs, path, {"streams": 2}).result()
    finally:
        os.sched_setaffinity(0, cores)
    assert {streams for streams, _ in alone} == {1}
    assert {streams for streams, _ in together} == {2}
