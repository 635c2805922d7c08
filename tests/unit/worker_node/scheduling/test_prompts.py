"""The prompts before a generation engine: interactive first, short before long, none starved."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.scheduling.prompts import JobQueue, PendingPrompt, PrefillMeter, choose_prompts, computed_in_step

FAR = 1e12
STEP = 256


@dataclass(frozen=True)
class Job:
    id: int
    interactive: bool = True
    deadline: float = FAR
    prompt_tokens: int = 10


def queue_of(*jobs):
    queue = JobQueue()
    for job in jobs:
        queue.add(job)
    return queue


def order(queue):
    return [prompt.job.id for prompt in queue.ranked(STEP)]


def test_first_in_first_out_within_a_priority_and_interactive_first():
    queue = queue_of(Job(1, False), Job(2), Job(3, False), Job(4))
    assert order(queue) == [2, 4, 1, 3]
    assert [queue.next().job.id for _ in range(4)] == [2, 4, 1, 3]
    assert queue.next() is None


def test_what_was_cancelled_or_is_late_leaves_the_queue():
    queue = queue_of(Job(1), Job(2, deadline=5.0), Job(3), Job(4, False, deadline=4.0))
    assert queue.remove(1).job.id == 1
    assert queue.remove(1) is None
    assert [prompt.job.id for prompt in queue.expired(5.0)] == [2, 4]
    assert queue.expired(5.0) == []
    assert order(queue) == [3]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), max_size=30))
def test_all_are_served_once_and_those_alike_in_order(jobs):
    queue = queue_of(*(Job(index, kind, prompt_tokens=tokens) for index, (kind, tokens) in enumerate(jobs)))
    served = order(queue)
    assert sorted(served) == list(range(len(jobs)))
    for kind in (True, False):
        steps = [(-(-jobs[index][1] // STEP), index) for index in served if jobs[index][0] is kind]
        assert steps == sorted(steps)


def test_batch_work_gets_its_share_of_the_tokens_under_endless_interactive_work():
    queue = queue_of(*(Job(-1 - index, False, prompt_tokens=100) for index in range(200)))
    tokens = {True: 0, False: 0}
    for index in range(1000):
        queue.add(Job(index, prompt_tokens=100))
        first = queue.next()
        tokens[first.job.interactive] += 100
        queue.computed(first, 100)
    share = tokens[False] / sum(tokens.values())
    assert 0.19 < share < 0.21


def prompts(*lefts, **more):
    return [PendingPrompt(Job(index, prompt_tokens=left, **more), left) for index, left in enumerate(lefts)]


def chosen(ranked, places=100, batch_places=100):
    return [prompt.job.id for prompt in choose_prompts(ranked, STEP, places=places, batch_places=batch_places)]


def test_two_steps_and_at_least_two_prompts_are_handed_over():
    assert chosen(prompts(8000, 8000, 8000)) == [0, 1]
    assert chosen(prompts(*[100] * 20)) == [0, 1, 2, 3, 4, 5]


def test_a_prompt_that_was_begun_stays_behind_the_others():
    ranked = prompts(*[100] * 20)
    ranked[19].begun = 1.0
    assert chosen(ranked) == [0, 1, 2, 3, 4, 5, 19]


def test_places_are_kept_and_those_of_batch_work():
    assert chosen(prompts(10, 10, 10), places=1) == [0]
    assert chosen(prompts(10, 10, 10), places=0) == []
    batch = prompts(10, 10, 10, interactive=False)
    assert chosen(batch, batch_places=2) == [0, 1]
    assert chosen(batch, batch_places=0) == []


def test_a_step_computes_prompts_in_order_beside_the_tokens_of_running_answers():
    assert computed_in_step([100, 8000, 50], 6, STEP) == [100, 150, 0]
    assert computed_in_step([100], 300, STEP) == [0]


def test_the_time_of_decoding_is_not_counted_as_that_of_prompts():
    meter = PrefillMeter()
    meter.stepped(0.2, 0, 6)
    meter.stepped(1.0, 150, 50)
    assert meter.take() == (150, pytest.approx(0.75))
    assert meter.take() == (0, 0.0)
