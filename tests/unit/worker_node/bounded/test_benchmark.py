"""The verdict of `bench --jobs` at the edges of what is accepted."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.bounded.model import REFERENCE_MODEL
from worker_node.bounded.proof import WARM_LIMIT_S, judge, measure_jobs, percentile
from worker_node.bounded.service import BoundedResult


def figures(**changes):
    return {
        name: {"p50_s": 1.0, "p95_s": 2.0, "limit_s": limit} | changes.get(name, {})
        for name, limit in WARM_LIMIT_S.items()
    }


@pytest.mark.parametrize(
    ("cold", "changes", "words"),
    [
        (15.0, {}, None),
        (15.1, {}, "cold first generation"),
        (1.0, {"title": {"p50_s": 4.9}}, None),
        (1.0, {"title": {"p50_s": 5.0}}, "title took"),
        (1.0, {"notification": {"p50_s": 5.0}}, "notification took"),
        (1.0, {"summary": {"p50_s": 9.9, "p95_s": 15.0}}, None),
        (1.0, {"summary": {"p50_s": 10.0}}, "summary took"),
        (1.0, {"memory_candidate": {"p95_s": 15.1}}, "no-go: memory_candidate"),
    ],
)
def test_figures_beyond_the_accepted_times_are_named(cold, changes, words):
    problems = judge(cold, figures(**changes))
    if words is None:
        assert not problems
    else:
        (problem,) = problems
        assert words in problem


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_covers_the_share(values, share):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


class ScriptedService:
    """Answers each job in a scripted time (ms), with or without an error."""

    initial_load_ms = 9.0

    def __init__(self, model_id=REFERENCE_MODEL, *, emulated=False, total=100.0, error=None):
        self.model_id = model_id
        self.npu = SimpleNamespace(emulated=emulated)
        self.total, self.error = total, error
        self.ran = []

    def cache_exists(self):
        return True

    async def run(self, request):
        self.ran.append(request.job.name)
        return BoundedResult({"json": None, "timing_ms": {"total": self.total}}, self.error)


async def test_every_job_is_measured_as_often_as_asked_after_a_cold_one():
    service = ScriptedService()
    report = await measure_jobs(service, 3)
    assert service.ran == ["title", *(name for name in sorted(WARM_LIMIT_S) for _ in range(3))]
    assert report.accepted is True
    assert {name: job["p95_s"] for name, job in report.figures["jobs"].items()} == dict.fromkeys(WARM_LIMIT_S, 0.1)
    assert {name: job["json_null"] for name, job in report.figures["jobs"].items()} == {
        "title": 0,
        "summary": 0,
        "notification": 3,
        "memory_candidate": 3,
    }


@pytest.mark.parametrize("scripted", [{"total": 15_100.0}, {"error": "the counter did not move"}])
async def test_what_is_slow_or_unproven_is_not_accepted(scripted):
    report = await measure_jobs(ScriptedService(**scripted), 1)
    assert report.accepted is False
    assert report.figures["problems"]
    assert bool(report.figures["failures"]) is ("error" in scripted)


@pytest.mark.parametrize("scripted", [{"model_id": "smollm2-135m-instruct"}, {"emulated": True}])
async def test_another_model_or_an_emulated_npu_is_no_evidence(scripted):
    report = await measure_jobs(ScriptedService(**scripted), 1)
    assert report.accepted is None
    assert report.figures["evidence"] is False
