"""The continuous generation engine itself, on real weights, without a process around it."""

import numpy as np
import pytest

from worker_node.domain import Device
from worker_node.engines.generation_continuous import ContinuousRunner
from worker_node.engines.messages import EngineSpec, GenerateJob, Step

pytestmark = pytest.mark.real

FAR = 1e12


@pytest.fixture(scope="module")
def runner(store):
    installed = store.get("smollm2-135m-instruct")
    runner = ContinuousRunner(
        EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, "continuous", {})
    )
    runner.load()
    yield runner
    runner.close()


def step(runner):
    """What one step brings forth."""
    events = []
    runner.step(events.append, lambda: None)
    return events


def test_a_cancelled_generation_gives_its_cache_back_without_waiting_for_another(runner):
    prompt = np.arange(100, 140, dtype="<i4").tobytes()
    for job_id in (1, 2):
        runner.submit(GenerateJob(job_id, prompt, 1000, FAR, ignore_eos=True))
    while not any(isinstance(event, Step) for event in step(runner)):
        assert runner.has_work
    assert runner.stats().kv_cache_usage > 0
    runner.cancel(1)
    runner.cancel(2)
    assert runner.has_work, "the scheduler frees the blocks in a step"
    assert step(runner) == []
    assert not runner.has_work
    stats = runner.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)
