"""The books of an embedding engine: every row comes back to its own job, and its cost with it."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.embedding_jobs import EmbeddingJobs, RunCost
from worker_node.engines.embedding_static import bucket_for
from worker_node.engines.messages import EmbedJob

FAR = 1e12


def job(job_id, *rows, deadline=FAR):
    flat = np.asarray(list(itertools.chain(*rows)), "<i4")
    return EmbedJob(job_id, flat.tobytes(), [len(row) for row in rows], deadline)


def run(books, batch, length, cost=None):
    """A device whose vector of a text is its first token and its length."""
    ids, mask = books.padded(batch, (len(batch), length))
    output = np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype("<f4")
    return list(books.finish(batch, output, cost or RunCost(ids.size), now=2.0))


def test_rows_of_several_jobs_in_one_run_go_back_to_their_jobs():
    books = EmbeddingJobs()
    books.add(job(1, [7, 8], [9]), 0.0)
    books.add(job(2, [5, 5, 5]), 0.0)
    done = run(books, books.take([1, 2, 0], 1.0), 4, RunCost(12, busy_us=300, busy_shared=True))
    vectors = {event.id: np.frombuffer(event.vectors, "<f4").reshape(-1, 2).tolist() for event in done}
    assert vectors == {1: [[7, 2], [9, 1]], 2: [[5, 3]]}
    assert {event.id: (event.busy_us, event.device_tokens) for event in done} == {1: (200, 8), 2: (100, 4)}
    assert all(event.busy_shared and event.started == 1.0 and event.inference_s == 1.0 for event in done)
    assert len(books) == 0


def test_without_a_counter_no_busy_time_is_claimed():
    books = EmbeddingJobs()
    books.add(job(1, [1], [2]), 0.0)
    assert run(books, books.take([0], 1.0), 1, RunCost(1, busy_us=5)) == []
    (event,) = run(books, books.take([0], 1.0), 1, RunCost(1, busy_us=None))
    assert event.busy_us is None


def test_unused_rows_attend_to_one_token():
    books = EmbeddingJobs()
    books.add(job(1, [3, 4]), 0.0)
    ids, mask = books.padded(books.take([0], 0.0), (3, 4))
    assert ids.tolist() == [[3, 4, 0, 0], [0] * 4, [0] * 4]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_what_nobody_waits_for_is_dropped():
    books = EmbeddingJobs()
    books.add(job(1, [1], [2], deadline=5.0), 0.0)
    books.add(job(2, [3]), 0.0)
    running = books.take([0], 0.0)
    assert books.expire(5.0) == [1]
    assert list(books.finish(running, np.zeros((1, 2), "<f4"), RunCost(1), 6.0)) == []
    assert [w.job_id for w in books.queue] == [2]
    books.cancel(2)
    assert not books.queue
    assert len(books) == 0


@given(st.integers(1, 256))
def test_the_smallest_bucket_that_holds_a_text(length):
    buckets = (32, 64, 128, 256)
    bucket = bucket_for(length, buckets)
    assert bucket >= length
    assert all(other < length for other in buckets if other < bucket)
