"""The proof and the times of the bounded jobs, as the commands report them."""

from types import SimpleNamespace

import pytest

from worker_node.bounded.service import PUBLISHED_NAME, WARM_LIMIT_S, BoundedResult, measure_jobs


class TimedService:
    """Answers each job in a scripted time (ms), with or without an error."""

    initial_load_ms = 9.0

    def __init__(self, model_id=PUBLISHED_NAME, *, emulated=False, total=100.0, error=None):
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
    service = TimedService()
    figures = await measure_jobs(service, 3)
    assert service.ran == ["title", *(name for name in sorted(WARM_LIMIT_S) for _ in range(3))]
    assert figures["accepted"] is True
    assert {name: job["p95_s"] for name, job in figures["jobs"].items()} == dict.fromkeys(WARM_LIMIT_S, 0.1)
    assert {name: job["json_null"] for name, job in figures["jobs"].items()} == {
        "title": 0,
        "summary": 0,
        "notification": 3,
        "memory_candidate": 3,
    }


@pytest.mark.parametrize("scripted", [{"model_id": "qwen2.5-1.5b-instruct"}, {"emulated": True}])
async def test_another_model_or_an_emulated_npu_is_no_evidence(scripted):
    figures = await measure_jobs(TimedService(**scripted), 1)
    assert figures["accepted"] is None
    assert figures["evidence"] is False
