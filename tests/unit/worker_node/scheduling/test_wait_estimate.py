"""What is learned from work: how fast it goes, and how long answers get."""

import pytest

from worker_node.scheduling.wait_estimate import AdmittedJob, Backlog, Capacity, Rate


def test_a_rate_follows_the_last_work_not_the_last_seconds():
    rate = Rate(memory=100)
    assert rate.per_second is None
    rate.measured(1000, 10.0)
    assert rate.per_second == pytest.approx(100)
    rate.measured(1, 1.0)
    assert rate.per_second > 50
    rate.measured(1000, 100.0)
    assert rate.per_second == pytest.approx(10, rel=0.02)


def test_work_that_was_done_along_with_other_work_counts_without_time():
    rate = Rate(memory=10_000)
    rate.measured(10, 1.0)
    rate.measured(10, 0.0)
    assert rate.per_second == pytest.approx(20, rel=0.01)


def expected(backlog, *, generated=0, limit=4096):
    """New tokens that are expected of one more answer."""
    job = AdmittedJob(0, limit, exact=False, interactive=True, generated=generated)
    backlog.add(job)
    tokens = backlog.tokens(interactive=True)
    backlog.remove(job)
    return tokens


def test_answers_are_expected_to_have_the_mean_length_of_the_last_ones():
    backlog = Backlog(Capacity(sequences=1))
    assert expected(backlog) == 256
    for length in [1000] * 50 + [10] * 200:
        job = AdmittedJob(0, 4096, exact=False, interactive=True, generated=length)
        backlog.answered(job)
    assert expected(backlog) < 15
    assert expected(backlog, limit=5) == 5
    assert expected(backlog, limit=100) == 100, "nothing is known of answers to such a limit"
    assert expected(backlog, generated=500) == 500, "it has outgrown the others"
