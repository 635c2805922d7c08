"""Row-level bookkeeping of embedding jobs: every row comes back to its own job, and its cost with it."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_node.encoders.jobs import RowJobs, RunCost
from worker_node.encoders.static import bucket_for
from worker_node.scheduling.texts import BatchLimits, LengthBuckets
from worker_node.tasks.embed.messages import Embedded, EmbedJob

FAR = 1e12
ALL = BatchLimits()
ONE = BatchLimits(max_rows=1)


def job(job_id, *rows, deadline=FAR):
    flat = np.asarray(list(itertools.chain(*rows)), "<i4")
    return EmbedJob(job_id, flat.tobytes(), [len(row) for row in rows], deadline)


def run(books, batch, length, cost=None):
    """A device whose vector of a text is its first token and its length."""
    ids, mask = books.padded(batch, (len(batch), length))
    output = np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype("<f4")
    return list(books.finish(batch, output, cost or RunCost(ids.size), now=2.0))


def test_rows_of_several_jobs_in_one_run_go_back_to_their_jobs():
    books = RowJobs(Embedded)
    books.add(job(1, [7, 8], [9]))
    books.add(job(2, [5, 5, 5]))
    done = run(books, books.take(ALL, 1.0), 4, RunCost(12, busy_us=300, busy_shared=True))
    vectors = {event.id: np.frombuffer(event.vectors, "<f4").reshape(-1, 2).tolist() for event in done}
    assert vectors == {1: [[7, 2], [9, 1]], 2: [[5, 3]]}
    assert {event.id: (event.busy_us, event.device_tokens) for event in done} == {1: (200, 8), 2: (100, 4)}
    assert all(event.busy_shared and event.started == 1.0 and event.inference_s == 1.0 for event in done)
    assert len(books) == 0


def test_without_a_counter_no_busy_time_is_claimed():
    books = RowJobs(Embedded)
    books.add(job(1, [1], [2]))
    assert run(books, books.take(ONE, 1.0), 1, RunCost(1, busy_us=5)) == []
    (event,) = run(books, books.take(ONE, 1.0), 1, RunCost(1, busy_us=None))
    assert event.busy_us is None


def test_unused_rows_attend_to_one_token():
    books = RowJobs(Embedded)
    books.add(job(1, [3, 4]))
    ids, mask = books.padded(books.take(ALL, 0.0), (3, 4))
    assert ids.tolist() == [[3, 4, 0, 0], [0] * 4, [0] * 4]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_what_nobody_waits_for_is_dropped():
    books = RowJobs(Embedded)
    books.add(job(1, [1], [2], deadline=5.0))
    books.add(job(2, [3]))
    running = books.take(ONE, 0.0)
    assert books.expire(5.0) == [1]
    assert list(books.finish(running, np.zeros((1, 2), "<f4"), RunCost(1), 6.0)) == []
    assert len(books.queue) == 1
    books.cancel(2)
    assert len(books.queue) == 0
    assert len(books) == 0


def test_a_job_whose_rows_all_run_is_not_expired():
    books = RowJobs(Embedded)
    books.add(job(1, [1], [2], deadline=5.0))
    running = books.take(ALL, 0.0)
    assert books.expire(6.0) == []
    assert [event.id for event in books.finish(running, np.zeros((2, 2), "<f4"), RunCost(2), 6.0)] == [1]


def test_interactive_texts_run_next_however_old_the_batch_texts_are():
    books = RowJobs(Embedded)
    batch = EmbedJob(1, np.ones(2000 * 8, "<i4").tobytes(), [8] * 2000, FAR, interactive=False)
    books.add(batch)
    limits = BatchLimits(max_tokens=512, max_rows=16)
    books.take(limits, now=0.0)
    for number in range(20):
        hours = 3600.0 * number
        books.take(limits, now=hours)
        books.add(job(10 + number, [4] * 8))
        assert [text.job_id for text in books.take(limits, now=hours + 1)] == [10 + number]


def test_the_work_per_batch_does_not_grow_with_the_queue(monkeypatch):
    """Counted in texts looked at, since a clock would measure the machine."""
    looked_at = 0
    original = LengthBuckets._in_order

    def counting(self, positions, anchor):
        nonlocal looked_at
        for text in original(self, positions, anchor):
            looked_at += 1
            yield text

    monkeypatch.setattr(LengthBuckets, "_in_order", counting)
    per_batch = {}
    for rows in (512, 8192):
        books = RowJobs(Embedded)
        lengths = [1 + row % 200 for row in range(rows)]
        books.add(EmbedJob(1, np.ones(sum(lengths), "<i4").tobytes(), lengths, FAR))
        batches = looked_at = 0
        while books.take(BatchLimits(max_tokens=512, run_overhead_tokens=32), 0.0):
            batches += 1
        per_batch[rows] = looked_at / rows
    assert math.isclose(per_batch[512], per_batch[8192], rel_tol=1.0)
    assert per_batch[8192] < 3


@given(st.integers(1, 256))
def test_the_smallest_bucket_that_holds_a_text(length):
    buckets = (32, 64, 128, 256)
    bucket = bucket_for(length, buckets)
    assert bucket >= length
    assert all(other < length for other in buckets if other < bucket)
