"""Row-level bookkeeping of embedding jobs: every row comes back to its own job, and its cost with it."""

import msgspec
import numpy as np

from worker_node.core.types import Busy
from worker_node.encoders.jobs import RowJobs, RunCost, row_job
from worker_node.scheduling.texts import BatchLimits

FAR = 1e12
ALL = BatchLimits(multiple=8)
ONE = BatchLimits(max_rows=1)


def job(job_id, *rows, deadline=FAR):
    return msgspec.structs.replace(row_job(rows, deadline), id=job_id)


def run(jobs, batch, length, cost=None):
    """A device whose vector of a text is its first token and its length."""
    ids, mask = jobs.padded(batch, (len(batch), length))
    output = np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype("<f4")
    return list(jobs.finish(batch, output, cost or RunCost(ids.size), now=2.0))


def test_rows_of_several_jobs_in_one_run_go_back_to_their_jobs():
    jobs = RowJobs()
    jobs.add(job(1, [7, 8], [9]))
    jobs.add(job(2, [5, 5, 5]))
    done = run(jobs, jobs.take(ALL, 1.0), 4, RunCost(12, Busy(300, True)))
    vectors = {event.id: np.frombuffer(event.data, "<f4").reshape(-1, 2).tolist() for event in done}
    assert vectors == {1: [[7, 2], [9, 1]], 2: [[5, 3]]}
    assert {event.id: (event.busy.us, event.device_tokens) for event in done} == {1: (200, 8), 2: (100, 4)}
    assert all(event.busy.shared and event.started == 1.0 and event.inference_s == 1.0 for event in done)
    assert len(jobs) == 0


def test_without_a_counter_no_busy_time_is_claimed():
    jobs = RowJobs()
    jobs.add(job(1, [1], [2]))
    assert run(jobs, jobs.take(ONE, 1.0), 1, RunCost(1, Busy(5))) == []
    (event,) = run(jobs, jobs.take(ONE, 1.0), 1, RunCost(1))
    assert event.busy.us is None


def test_unused_rows_attend_to_one_token():
    jobs = RowJobs()
    jobs.add(job(1, [3, 4]))
    ids, mask = jobs.padded(jobs.take(ALL, 0.0), (3, 4))
    assert ids.tolist() == [[3, 4, 0, 0], [0] * 4, [0] * 4]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_what_nobody_waits_for_is_dropped():
    jobs = RowJobs()
    jobs.add(job(1, [1], [2], deadline=5.0))
    jobs.add(job(2, [3]))
    running = jobs.take(ONE, 0.0)
    assert jobs.expire(5.0) == [1]
    assert list(jobs.finish(running, np.zeros((1, 2), "<f4"), RunCost(1), 6.0)) == []
    assert len(jobs.queue) == 1
    jobs.cancel(2)
    assert len(jobs.queue) == 0
    assert len(jobs) == 0


def test_a_job_whose_rows_all_run_is_not_expired():
    jobs = RowJobs()
    jobs.add(job(1, [1], [2], deadline=5.0))
    running = jobs.take(ALL, 0.0)
    assert jobs.expire(6.0) == []
    assert [event.id for event in jobs.finish(running, np.zeros((2, 2), "<f4"), RunCost(2), 6.0)] == [1]
