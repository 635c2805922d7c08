"""A driver that is ended anywhere loses no row and repeats none: the next run completes the output."""

import asyncio

import pytest

from backend_client.bulk import BulkRequest, ExitCode, status
from tests.faults.bulk.data_sets import ROWS_PER_GROUP, assert_whole, rows_of
from tests.faults.bulk.steps import STEPS

SIGKILL = -9


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_killed_at_any_step_is_continued(starter, tmp_path, step):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, step=step) == SIGKILL, "the step was not reached"
    committed = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert started.run(source, out) == 0
    assert_whole(out, texts)
    assert {name: (out / name).stat().st_mtime_ns for name in committed} == committed, "a committed file was replaced"


def test_rejected_rows_are_there_before_their_data(starter, tmp_path):
    started, source, texts = starter
    # The first fragment of the JSON lines, which has the bad rows.
    assert started.run(source, tmp_path / "out", step="data committed", occurrence=6) == SIGKILL
    assert started.run(source, tmp_path / "out") == 0
    assert_whole(tmp_path / "out", texts)


def test_drivers_killed_one_after_another_at_all_steps_get_done(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    for occurrence in (2, 1):
        for step in STEPS:
            started.run(source, out, step=step, occurrence=occurrence)
    assert started.run(source, out) == 0
    assert_whole(out, texts)


def test_two_drivers_of_one_job_repeat_no_row(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    pids = [started.start(source, out) for _ in range(2)]
    assert [started.wait(pid) for pid in pids] == [0, 0]
    assert_whole(out, texts)


@pytest.mark.parametrize("step", ["rejected rows committed", "data committed", "all fragments committed"])
def test_a_second_driver_goes_on_when_the_first_is_killed(starter, tmp_path, step):
    started, source, texts = starter
    out = tmp_path / "out"
    pids = [started.start(source, out, step=step), started.start(source, out)]
    # The first may find everything committed before it reaches the step.
    assert started.wait(pids[0]) in {SIGKILL, 0}
    assert started.wait(pids[1]) == 0
    # The first may be killed after the second has completed the job: the next run removes what it was writing.
    assert started.run(source, out) == 0
    assert_whole(out, texts)


def test_shards_together_do_every_row_and_the_last_one_completes_the_job(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, shard="0/3", step="temporary file complete") == SIGKILL
    for shard in ("2/3", "1/3"):
        assert started.run(source, out, shard=shard) == 0
    assert not (out / "_SUCCESS").exists()
    assert started.run(source, out, shard="0/3") == 0
    assert_whole(out, texts)


@pytest.mark.parametrize(
    ("step", "sign"),
    [("fragment begun", "SIGTERM"), ("temporary file complete", "SIGINT"), ("data committed", "SIGTERM")],
)
def test_an_interrupted_driver_says_so_and_is_continued(starter, tmp_path, step, sign):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, step=step, sign=sign) == ExitCode.INTERRUPTED
    assert not (out / "_SUCCESS").exists()
    assert started.run(source, out) == 0
    assert_whole(out, texts)


def test_a_full_disk_ends_the_run_and_keeps_what_is_committed(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    # Smaller than a data file, larger than what describes the job.
    assert started.run(source, out, largest_file=6000) == 1
    assert rows_of(out) == {}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert started.run(source, out) == 0
    assert_whole(out, texts)


@pytest.mark.parametrize("row", [0, ROWS_PER_GROUP])
def test_a_fragment_that_kills_the_process_holds_up_no_other_in_three_runs(starter, tmp_path, row):
    started, source, texts = starter
    out = tmp_path / "out"
    # Beside another fragment, alone before that one, and after it.
    assert [started.run(source, out, deadly=row) for _ in range(3)] == [SIGKILL] * 3
    assert set(texts) - set(rows_of(out)) == set(texts[row : row + ROWS_PER_GROUP])
    request = BulkRequest(kind="embed", source=str(source), out=str(out), column="text", max_rejected=0.1)
    assert asyncio.run(status(request)).exit_code is ExitCode.INCOMPLETE
    assert started.run(source, out) == 0
    assert_whole(out, texts)
    assert not [*(out / "_begun").iterdir()]
