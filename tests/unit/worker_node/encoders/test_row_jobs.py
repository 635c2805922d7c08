"""Row-level bookkeeping of embedding jobs: every row comes back to its own job, and its cost with it."""

import msgspec
import numpy as np
import pytest

from worker_node.core.types import NOT_MEASURED, Busy
from worker_node.encoders.jobs import RowRunner, row_job
from worker_node.scheduling.texts import BatchLimits

FAR = 1e12
ALL = BatchLimits(multiple=8)
ONE = BatchLimits(max_rows=1)


def job(job_id, *rows, deadline=FAR):
    return msgspec.structs.replace(row_job(rows, deadline), id=job_id)


def run(jobs, batch, length, busy=NOT_MEASURED):
    """A device whose vector of a text is its first token and its length."""
    ids, mask = jobs.inputs(batch, (len(batch), length)).values()
    output = np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype("<f4")
    return list(jobs.finish(batch, output, 2.0, ids.size, busy))


def test_rows_of_several_jobs_in_one_run_go_back_to_their_jobs():
    jobs = RowRunner()
    jobs.submit(job(1, [7, 8], [9]))
    jobs.submit(job(2, [5, 5, 5]))
    done = run(jobs, jobs.take(ALL, 1.0), 4, Busy(300, True))
    vectors = {event.id: np.frombuffer(event.data, "<f4").reshape(-1, 2).tolist() for event in done}
    assert vectors == {1: [[7, 2], [9, 1]], 2: [[5, 3]]}
    assert {event.id: (event.busy.us, event.device_tokens) for event in done} == {1: (200, 8), 2: (100, 4)}
    assert all(event.busy.shared and event.started == 1.0 and event.inference_s == 1.0 for event in done)
    assert not jobs._open


def test_without_a_counter_no_busy_time_is_claimed():
    jobs = RowRunner()
    jobs.submit(job(1, [1], [2]))
    assert run(jobs, jobs.take(ONE, 1.0), 1, Busy(5)) == []
    (event,) = run(jobs, jobs.take(ONE, 1.0), 1)
    assert event.busy.us is None


def test_unused_rows_attend_to_one_token():
    jobs = RowRunner()
    jobs.submit(job(1, [3, 4]))
    ids, mask = jobs.inputs(jobs.take(ALL, 0.0), (3, 4)).values()
    assert ids.tolist() == [[3, 4, 0, 0], [0] * 4, [0] * 4]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_what_nobody_waits_for_is_dropped():
    jobs = RowRunner()
    jobs.submit(job(1, [1], [2], deadline=5.0))
    jobs.submit(job(2, [3]))
    running = jobs.take(ONE, 0.0)
    expired = []
    jobs.expire(5.0, expired.append)
    assert [(event.id, event.code) for event in expired] == [(1, "deadline_exceeded")]
    assert list(jobs.finish(running, np.zeros((1, 2), "<f4"), 6.0, 1)) == []
    assert len(jobs.queue) == 1
    jobs.cancel(2)
    assert len(jobs.queue) == 0
    assert not jobs._open


def test_a_job_whose_rows_all_run_is_not_expired():
    jobs = RowRunner()
    jobs.submit(job(1, [1], [2], deadline=5.0))
    running = jobs.take(ALL, 0.0)
    jobs.expire(6.0, pytest.fail)
    assert [event.id for event in jobs.finish(running, np.zeros((2, 2), "<f4"), 6.0, 2)] == [1]
