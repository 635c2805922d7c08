"""Runs of texts: nothing lost, nothing over budget, the oldest first, one padded length, interactive before batch."""

from hypothesis import given
from hypothesis import strategies as st

from worker_node.scheduling.texts import TURN_TOKENS, BatchLimits, TextQueue, Waiting

LIMITS = BatchLimits(max_tokens=512, max_rows=16)

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=80)
limits = st.builds(
    BatchLimits,
    max_tokens=st.integers(1, 600),
    max_rows=st.integers(1, 20),
    multiple=st.integers(1, 40),
    longest_text=st.none() | st.integers(1, 400),
    lengths=st.just(()) | st.just((32, 64, 300)),
)


def queue_of(values, *, interactive=True, job_id=1):
    queue = TextQueue()
    for row, length in enumerate(values):
        queue.add(Waiting(job_id, row, length, interactive))
    return queue


@given(lengths, limits, st.integers(1, 4))
def test_a_batch_keeps_its_bounds_and_serves_the_oldest(values, limits, free):
    batch = queue_of(values).take(limits, free)
    assert 0 in [text.row for text in batch]
    assert len({limits.padded(text.length) for text in batch}) == 1, "one padded length"
    assert len(batch) == 1 or limits.computed(batch) <= limits.max_tokens
    assert len(batch) <= limits.max_rows


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 300), st.booleans()), min_size=1, max_size=80), limits)
def test_the_first_text_is_the_one_that_the_next_run_begins_with(texts, limits):
    queue = TextQueue()
    for row, (job_id, length, interactive) in enumerate(texts):
        queue.add(Waiting(job_id, row, length, interactive))
    while len(queue):
        first = queue.first(limits)
        assert queue.take(limits)[0] == first


@given(st.integers(1, 600), st.integers(1, 40), st.none() | st.integers(1, 400))
def test_a_run_is_as_long_as_its_longest_text_rounded_up_but_not_beyond_the_limit(length, multiple, limit):
    padded = BatchLimits(multiple=multiple, longest_text=limit).padded(length)
    assert length <= padded < length + multiple
    assert padded % multiple == 0 or padded in (length, limit)
    assert limit is None or padded <= max(limit, length)


@given(lengths, st.data())
def test_removed_texts_never_run_and_leave_nothing_behind(values, data):
    queue = queue_of(values)
    gone = data.draw(st.sets(st.integers(0, len(values) - 1)))
    for row in gone:
        assert queue.remove(1, row)
        assert not queue.remove(1, row)
    rows = set()
    while batch := queue.take(LIMITS):
        rows |= {text.row for text in batch}
    assert rows == set(range(len(values))) - gone
    assert len(queue) == 0


def test_jobs_of_no_more_than_a_turn_are_served_first_in_first_out():
    queue = TextQueue()
    for job_id in (3, 1, 2):
        for row in range(4):
            queue.add(Waiting(job_id, row, TURN_TOKENS // 4))
    served = [queue.take(BatchLimits(max_rows=1))[0].job_id for _ in range(12)]
    assert served == [3] * 4 + [1] * 4 + [2] * 4


def test_large_jobs_take_turns_and_a_small_one_waits_for_the_next_turn_of_each():
    queue = TextQueue()
    length = TURN_TOKENS // 8
    for job_id in (1, 2):
        for row in range(80):
            queue.add(Waiting(job_id, row, length))
    limits = BatchLimits(max_rows=1)
    assert [queue.take(limits)[0].job_id for _ in range(32)] == ([1] * 8 + [2] * 8) * 2
    queue.take(limits)
    queue.add(Waiting(3, 0, 5))
    served = [queue.take(limits)[0].job_id for _ in range(16)]
    assert served == [1] * 7 + [2] * 8 + [3]


def test_batch_texts_get_their_share_and_no_more_while_interactive_texts_keep_coming():
    queue = queue_of([10] * 1000, interactive=False)
    served = {True: 0, False: 0}
    limits = BatchLimits(max_tokens=100)
    for job_id in range(2, 402):
        for row in range(10):
            queue.add(Waiting(job_id, row, 10))
        batch = queue.take(limits)
        served[batch[0].interactive] += sum(text.length for text in batch)
    share = served[False] / sum(served.values())
    assert abs(share - 0.2) < 0.01
