"""The proof and the times of the bounded jobs, as the commands report them."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker_node.bounded.jobs import SMOKE, bounded
from worker_node.bounded.proof import WARM_LIMIT_S, measure_jobs, smoke
from worker_node.bounded.service import REFERENCE_MODEL, BoundedResult
from worker_node.core.errors import EngineUnavailable
from worker_node.devices.npu import Reading

SECRET = "canary-7f3a"


@dataclass
class ScriptedService:
    """Counts its generations; the counter is read from a list whose last value stays."""

    readings: list
    exclusive: bool = True
    error: str | None = None
    generations: int = 0
    npu: object = field(default_factory=lambda: SimpleNamespace(emulated=False))
    choice: object = field(default_factory=lambda: SimpleNamespace(path=Path("/models/m")))

    def busy_time(self):
        value = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        return Reading(value, None if value is not None else "no NPU at /sys")

    async def ready(self):
        pass

    def proof(self):
        return SimpleNamespace(device_name="Intel AI Boost", driver="1019", runtime="2026.4.1")

    def engine_pid(self):
        return None

    async def run(self, request):
        self.generations += 1
        payload = {
            "model": "m",
            "device": "NPU",
            "text": SECRET,
            "timing_ms": {"initial_load": 9.0, "generate": 5.0},
            "npu_busy_before_us": 10,
            "npu_busy_after_us": 30,
            "npu_busy_delta_us": 20,
        }
        return BoundedResult(payload if self.exclusive else payload | {"npu_busy_exclusive": False}, self.error)


REQUEST = bounded(SMOKE, f"Who is {SECRET}?", 24)


async def test_a_pass_is_one_generation_and_a_record_without_text():
    service = ScriptedService([10])
    record = await smoke(service, REQUEST)
    assert record.passed
    assert service.generations == 1
    assert record.facts["verdict"] == "pass"
    assert (record.facts["driver"], record.facts["prompt_characters"]) == ("1019", len(f"Who is {SECRET}?"))
    assert record.facts["output_characters"] == len(SECRET)
    assert not record.facts["warnings"]
    assert SECRET not in str(record)


async def test_without_a_counter_nothing_is_generated():
    service = ScriptedService([None])
    with pytest.raises(EngineUnavailable, match="no NPU at /sys"):
        await smoke(service, REQUEST)
    assert service.generations == 0


class TimedService:
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
    service = TimedService()
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


@pytest.mark.parametrize("scripted", [{"model_id": "smollm2-135m-instruct"}, {"emulated": True}])
async def test_another_model_or_an_emulated_npu_is_no_evidence(scripted):
    report = await measure_jobs(TimedService(**scripted), 1)
    assert report.accepted is None
    assert report.figures["evidence"] is False
