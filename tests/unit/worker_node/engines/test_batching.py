"""Batches: nothing lost, nothing over budget, the oldest first, like with like."""

from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.batching import BatchLimits, Waiting, plan_batch

LIMITS = BatchLimits(max_tokens=512, max_rows=16, batch_patience_s=1.0)


def queue_of(lengths, *, interactive=None):
    flags = interactive or [True] * len(lengths)
    return [Waiting(1, i, n, float(i), flag) for i, (n, flag) in enumerate(zip(lengths, flags, strict=True))]


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@given(lengths, st.integers(1, 4))
def test_a_batch_keeps_its_bounds_and_serves_the_oldest(values, free):
    queue = queue_of(values)
    picked = plan_batch(queue, LIMITS, free_slots=free, now=0.0)
    assert len(set(picked)) == len(picked) >= 1
    assert 0 in picked
    longest = max(queue[i].length for i in picked)
    assert len(picked) == 1 or longest * len(picked) <= LIMITS.max_tokens
    assert len(picked) <= LIMITS.max_rows
    assert [queue[i].length for i in picked] == sorted(queue[i].length for i in picked)


@given(lengths, st.integers(1, 4))
def test_repeated_batches_drain_any_queue(values, free):
    queue = queue_of(values)
    for _ in range(len(values)):
        taken = set(plan_batch(queue, LIMITS, free_slots=free, now=0.0))
        queue = [w for i, w in enumerate(queue) if i not in taken]
        if not queue:
            break
    assert not queue


def test_an_empty_queue_gives_no_batch():
    assert plan_batch([], LIMITS, free_slots=1, now=0.0) == []


def test_texts_of_like_length_run_together():
    queue = queue_of([10, 200, 11, 190, 12])
    picked = plan_batch(queue, BatchLimits(max_tokens=36), free_slots=1, now=0.0)
    assert [queue[i].length for i in picked] == [10, 11, 12]


def test_a_text_that_would_cost_more_padding_than_a_run_of_its_own_waits():
    queue = queue_of([10, 60, 12, 40])
    picked = plan_batch(queue, BatchLimits(run_overhead_tokens=16), free_slots=1, now=0.0)
    assert [queue[i].length for i in picked] == [10, 12]


def test_free_slots_share_the_queue():
    queue = queue_of([20] * 16)
    assert len(plan_batch(queue, LIMITS, free_slots=2, now=0.0)) == 8


def test_interactive_goes_first_until_batch_work_has_waited_long_enough():
    queue = queue_of([10, 10], interactive=[False, True])
    assert plan_batch(queue, LIMITS, free_slots=2, now=0.5) == [1]
    assert 0 in plan_batch(queue, LIMITS, free_slots=1, now=5.0)


def test_a_text_over_the_budget_still_runs_alone():
    queue = queue_of([2000, 5])
    assert plan_batch(queue, LIMITS, free_slots=1, now=0.0) == [0]
