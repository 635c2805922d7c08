"""Several runs at once on the NPU: which start, what each job gets of them, and what a failure of one does."""

from contextlib import contextmanager
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.overlapping_runner import RECOMMENDED, ScriptedEncoder
from worker_node.core.types import Device
from worker_node.encoders.jobs import RowResult, row_job
from worker_node.encoders.static import StaticEncoder
from worker_node.engines.protocol import DeviceBroken, EngineSpec, Failed, Running

FAR = 1e12


class Engine:
    """An engine whose device does what the test says; the counter moves as the test says, too."""

    def __init__(self, counter, runner=ScriptedEncoder, **options):
        self.counter = counter
        counter.write_text("0\n")
        given = {"npu_buckets": [16, 2048], "busy_counter": str(counter)} | options
        self.runner = runner(EngineSpec("m", "embedding", "/", Device.NPU, "", given, emulated=True))
        self.runner.load()
        self.events = []

    def work(self, us):
        self.counter.write_text(f"{int(self.counter.read_text()) + us}\n")

    def submit(self, number, *rows, deadline=FAR):
        self.runner.submit(msgspec.structs.replace(row_job(rows, deadline), id=number))
        self.step()

    def step(self):
        self.runner.step(self._emit, lambda: None)

    def _emit(self, event):
        self.events += event.parts() if hasattr(event, "parts") else [event]

    def end(self, *firsts, error=None):
        for first in firsts:
            self.runner.end(first, error)
        self.step()

    @property
    def begun(self):
        return [request.first for request in self.runner.begun]

    def of(self, form):
        return [event for event in self.events if isinstance(event, form)]

    @property
    def vectors(self):
        return {event.id: event.rows(len(event.data) // 8).tolist() for event in self.of(RowResult)}


@contextmanager
def running(directory, **how):
    engine = Engine(directory / "busy", **how)
    try:
        yield engine
    finally:
        engine.runner.close()


def test_as_many_runs_are_active_as_the_plugin_recommends_and_the_next_starts_when_one_ends(tmp_path):
    with running(tmp_path) as engine:
        engine.submit(1, *([first] for first in range(1, 8)))
        assert engine.begun == [1, 2, 3, 4]
        assert len(engine.begun) == RECOMMENDED
        assert not engine.runner.has_work, "the loop would spin"
        engine.end(3)
        assert engine.begun == [1, 2, 4, 5]


@pytest.mark.parametrize("requests", [1, 2])
def test_the_option_says_how_many_runs_are_active(tmp_path, requests):
    with running(tmp_path, infer_requests=requests) as engine:
        engine.submit(1, [1], [2], [3])
        assert engine.begun == [1, 2, 3][:requests]


def test_long_texts_run_at_once_only_as_far_as_their_tokens_allow(tmp_path):
    with running(tmp_path) as engine:
        engine.submit(1, [1] * 2048, [2] * 17, [3] * 17)
        assert engine.begun == [1, 2]
        assert not engine.runner.has_work
        engine.end(1)
        assert engine.begun == [2, 3]


def test_a_full_run_is_not_divided_among_idle_requests(tmp_path):
    with running(tmp_path, npu_batch_size=4) as engine:
        engine.submit(1, [1], [2], [3], [4], [5])
        assert engine.begun == [1, 5]


def test_where_the_device_has_no_memory_for_another_run_fewer_are_active(tmp_path, caplog):
    class Small(ScriptedEncoder):
        memory_for = 2

    with running(tmp_path, runner=Small) as engine:
        engine.submit(1, [1], [2], [3])
        assert engine.begun == [1, 2]
        assert not engine.runner.has_work
        assert "only 2 runs at once: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY" in caplog.text
        engine.end(1, 2)
        engine.end(3)
        assert engine.vectors == {1: [[1, 1], [2, 1], [3, 1]]}


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_text_has_its_own_vector_in_whatever_order_runs_end(tmp_path_factory, data):
    jobs = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5), "texts of each job")
    firsts = iter(range(1, 100))
    rows = {number: [[next(firsts)] * (1 + row) for row in range(count)] for number, count in enumerate(jobs)}
    batch = data.draw(st.integers(1, 4), "texts of a run")
    with running(tmp_path_factory.mktemp("npu"), npu_batch_size=batch) as engine:
        for number, texts in rows.items():
            engine.submit(number, *texts)
        while engine.begun:
            engine.work(data.draw(st.integers(100, 900), "microseconds"))
            engine.end(*data.draw(st.lists(st.sampled_from(engine.begun), min_size=1, unique=True), "runs that end"))
        total = int(engine.counter.read_text())
        results = engine.of(RowResult)
    assert engine.vectors == {number: [[row[0], len(row)] for row in texts] for number, texts in rows.items()}
    claimed = sum(result.busy.us for result in results)
    assert total - 2 * sum(jobs) <= claimed <= total
    assert all(result.busy.us > 0 for result in results), "each is proven"


def test_a_cancelled_job_has_no_further_run_and_its_active_one_is_ignored(tmp_path):
    with running(tmp_path, infer_requests=2) as engine:
        engine.submit(1, [1], [2], [3])
        engine.submit(2, [4])
        engine.runner.cancel(1)
        assert engine.of(Running) == [Running([1])]
        engine.end(1)
        assert engine.begun == [2, 4]
        assert engine.of(Running)[-1] == Running([1, 2]), "the device cannot be called back"
        engine.end(2)
        assert engine.of(Running)[-1] == Running([2])
        engine.end(4)
        assert engine.vectors == {2: [[4, 1]]}


def test_a_deadline_that_passes_between_the_rows_of_a_job_ends_it(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("worker_node.encoders.runs.time.monotonic", lambda: now[0])
    with running(tmp_path, infer_requests=3) as engine:
        engine.submit(3, [5], deadline=5.0)
        engine.submit(1, [1], [2], [3], deadline=5.0)
        engine.submit(2, [4])
        now[0] = 5.0
        engine.end(1, 2)
        assert [(event.id, event.code) for event in engine.of(Failed)] == [(1, "deadline_exceeded")]
        assert engine.begun == [5, 4]
        engine.end(5)
        assert engine.vectors == {3: [[5, 1]]}, "all of its rows ran"


def test_without_a_counter_no_busy_time_is_claimed(tmp_path):
    with running(tmp_path, infer_requests=1) as engine:
        engine.submit(1, [1], [2])
        engine.work(5)
        engine.end(1)
        engine.counter.unlink()
        engine.end(2)
        assert [result.busy.us for result in engine.of(RowResult)] == [None]


def test_unused_rows_of_a_run_attend_to_one_token(tmp_path):
    with running(tmp_path, npu_batch_size=3) as engine:
        engine.submit(1, [3, 4])
        (request,) = engine.runner.begun
        ids, mask = (request.inputs[name][:, :3].tolist() for name in ("input_ids", "attention_mask"))
    assert ids == [[3, 4, 0], [0] * 3, [0] * 3]
    assert mask == [[1, 1, 0], [1, 0, 0], [1, 0, 0]], "a mean over no token is not a number"


def test_what_runs_is_said_before_it_starts_and_only_when_it_changes(tmp_path):
    with running(tmp_path, infer_requests=2) as engine:
        started = engine.runner._start
        said = []
        engine.runner._start = lambda slot: (said.append(engine.of(Running)), started(slot))
        engine.submit(1, [1], [2], [3])
        assert said == [[Running([1])]] * 2
        engine.submit(2, [4])
        engine.end(1)
        assert engine.of(Running) == [Running([1])]
        engine.end(2)
        assert engine.of(Running) == [Running([1]), Running([1, 2])]


def test_a_run_that_fails_ends_the_engine_after_the_others_have_answered_and_only_its_jobs_are_suspects(tmp_path):
    with running(tmp_path, infer_requests=2) as engine:
        engine.submit(1, [1])
        engine.submit(2, [2])
        engine.submit(3, [3])
        engine.end(2, error="Check failed\nthe device is lost")
        assert engine.begun == [1], "nothing new is given to a device that has failed"
        assert not engine.runner.has_work
        assert engine.runner.stats().oldest_run is not None, "the watchdog still judges the other run"
        with pytest.raises(DeviceBroken, match="the NPU failed in a run: the device is lost"):
            engine.end(1)
        assert engine.vectors == {1: [[1, 1]]}
        assert engine.of(Running)[-1] == Running([2])


def test_runs_that_fail_together_are_all_suspects(tmp_path):
    with running(tmp_path, infer_requests=2) as engine:
        engine.submit(1, [1])
        engine.submit(2, [2])
        with pytest.raises(DeviceBroken):
            engine.end(1, 2, error="DEVICE_LOST")
        assert engine.of(Running)[-1] == Running([1, 2])
        assert not engine.vectors


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, "THROUGHPUT"),
        ({"infer_requests": 2}, "THROUGHPUT"),
        ({"infer_requests": 1}, "LATENCY"),
        ({"plugin_config": {"PERFORMANCE_HINT": "LATENCY"}}, "LATENCY"),
    ],
)
def test_a_model_is_compiled_for_throughput_unless_its_runs_come_one_at_a_time(options, hint):
    given = {"npu_buckets": [16, 32]} | options
    runner = StaticEncoder(EngineSpec("m", "embedding", "/", Device.NPU, "", given))
    core = Mock()
    core.read_model.return_value.inputs = ()
    assert [length for length, _ in runner._models(core, None)] == [16, 32]
    assert [call.args[2]["PERFORMANCE_HINT"] for call in core.compile_model.call_args_list] == [hint] * 2
    runner.close()
