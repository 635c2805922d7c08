"""The line before an engine that does one job at a time."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.waiting import WaitingLine

FAR = 1e12


@dataclass(frozen=True)
class Job:
    id: int
    interactive: bool = True
    deadline: float = FAR


def served(line, now):
    order = []
    while (job := line.next(now)) is not None:
        order.append(job.id)
    return order


def line_of(*jobs, now=0.0, **options):
    line = WaitingLine(**options)
    for job in jobs:
        line.add(job, now)
    return line


def test_first_in_first_out_within_a_priority_and_interactive_first():
    line = line_of(Job(1, False), Job(2), Job(3, False), Job(4))
    assert served(line, now=1.0) == [2, 4, 1, 3]


def test_a_batch_job_that_waited_long_goes_by_its_arrival():
    line = line_of(Job(1, False), patience_s=10)
    line.add(Job(2), 9.0)
    assert served(line, now=10.0) == [1, 2]


def test_what_was_cancelled_or_is_late_leaves_the_line():
    line = line_of(Job(1), Job(2, deadline=5.0), Job(3))
    assert line.remove(1)
    assert not line.remove(1)
    assert [job.id for job in line.expired(5.0)] == [2]
    assert served(line, now=6.0) == [3]
    assert line.next(7.0) is None


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 20))
def test_all_are_served_once_and_in_order_within_their_priority(kinds, patience):
    line = WaitingLine(patience)
    for index, interactive in enumerate(kinds):
        line.add(Job(index, interactive), float(index))
    order = served(line, now=float(len(kinds)))
    assert sorted(order) == list(range(len(kinds)))
    for kind in (True, False):
        of_kind = [i for i in order if kinds[i] is kind]
        assert of_kind == sorted(of_kind)


@given(st.integers(1, 50))
def test_batch_work_is_never_starved(rate):
    """However many interactive jobs keep arriving, one batch job waits no longer than its patience and one job."""
    line = line_of(Job(0, False), patience_s=10)
    for second in range(1, 12):
        for i in range(rate):
            line.add(Job(second * 100 + i), float(second))
        if line.next(float(second)).id == 0:
            assert second <= 10
            return
    raise AssertionError("the batch job was never served")
