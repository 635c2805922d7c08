"""The queue before a generation engine: interactive first, batch work slowed and never starved."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from worker_node.scheduling.jobs import JobQueue

FAR = 1e12


@dataclass(frozen=True)
class Job:
    id: int
    interactive: bool = True
    deadline: float = FAR
    prompt_tokens: int = 10
    max_new_tokens: int = 90


def queue_of(*jobs):
    queue = JobQueue()
    for job in jobs:
        queue.add(job)
    return queue


def served(queue, **options):
    order = []
    while (pick := queue.next(**options)) is not None:
        order.append(pick.job.id)
    return order


def test_first_in_first_out_within_a_priority_and_interactive_first():
    queue = queue_of(Job(1, False), Job(2), Job(3, False), Job(4))
    assert served(queue) == [2, 4, 1, 3]


def test_batch_work_waits_where_it_may_not_run():
    queue = queue_of(Job(1, False), Job(2))
    assert served(queue, batch=False) == [2]
    assert served(queue) == [1]


def test_a_job_that_was_taken_back_is_the_next_of_its_kind():
    queue = queue_of(Job(1, False), Job(2, False))
    queue.add(queue.next().job, first=True)
    assert served(queue) == [1, 2]


def test_a_job_that_was_put_back_expires_once():
    queue = queue_of(Job(1, False, deadline=5.0), Job(2, False, deadline=5.0))
    queue.add(queue.next().job, first=True)
    assert sorted(job.id for job in queue.expired(5.0)) == [1, 2]


def test_what_was_cancelled_or_is_late_leaves_the_queue():
    queue = queue_of(Job(1), Job(2, deadline=5.0), Job(3), Job(4, False, deadline=4.0))
    assert queue.remove(1)
    assert not queue.remove(1)
    assert [job.id for job in queue.expired(5.0)] == [4, 2]
    assert queue.expired(5.0) == []
    assert served(queue) == [3]
    assert queue.next() is None


@given(st.lists(st.booleans(), max_size=30))
def test_all_are_served_once_and_in_order_within_their_priority(kinds):
    queue = queue_of(*(Job(index, interactive) for index, interactive in enumerate(kinds)))
    order = served(queue)
    assert sorted(order) == list(range(len(kinds)))
    for kind in (True, False):
        of_kind = [i for i in order if kinds[i] is kind]
        assert of_kind == sorted(of_kind)


def test_batch_work_gets_its_share_of_the_tokens_under_endless_interactive_work():
    queue = queue_of(*(Job(-1 - index, False) for index in range(200)))
    tokens = {True: 0, False: 0}
    for index in range(1000):
        queue.add(Job(index))
        pick = queue.next()
        tokens[pick.job.interactive] += 100
        if pick.job.interactive:
            queue.served(100)
    share = tokens[False] / sum(tokens.values())
    assert 0.09 < share < 0.11


def test_no_batch_work_runs_before_the_interactive_work_that_it_waited_for_paid_for_it():
    queue = queue_of(Job(0, False))
    order = []
    for index in range(1, 12):
        queue.add(Job(index))
        queue.add(Job(100 + index))
        pick = queue.next()
        order.append((pick.job.id, pick.owed))
        queue.served(10)
    # Ten prompt tokens are a tenth of the tokens after ninety interactive ones.
    assert [job_id for job_id, owed in order].index(0) == 9
    assert order[9] == (0, True)


def test_cancelled_jobs_leave_no_deadlines_behind():
    queue = JobQueue()
    for index in range(10_000):
        queue.add(Job(index))
        queue.remove(index)
    assert len(queue._deadlines._heap) < 200
