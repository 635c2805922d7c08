"""What the smoke test warns of and records, over a scripted service."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker_node.bounded.jobs import SMOKE, bounded
from worker_node.bounded.proof import smoke
from worker_node.bounded.service import BoundedResult
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


async def test_a_counter_that_moves_while_nothing_runs_is_not_exclusive():
    record = await smoke(ScriptedService([10, 10, 500]), REQUEST)
    assert record.passed
    (told,) = record.facts["warnings"]
    assert told.startswith("the delta is not exclusive: the counter moves while nothing")


async def test_what_the_engine_saw_of_others_is_told():
    record = await smoke(ScriptedService([10], exclusive=False), REQUEST)
    assert "more than this generation" in record.facts["warnings"][0]


async def test_other_processes_on_the_npu_are_named(monkeypatch):
    monkeypatch.setattr("worker_node.bounded.proof.npu_users", lambda: [4711])
    record = await smoke(ScriptedService([10]), REQUEST)
    assert "4711" in record.facts["warnings"][0]


async def test_an_unproven_generation_fails_with_the_reason():
    record = await smoke(ScriptedService([10], error="the counter did not move"), REQUEST)
    assert not record.passed
    assert (record.facts["verdict"], record.facts["reason"]) == ("fail", "the counter did not move")
