"""The continuous generation engine itself, on real weights, without a process around it."""

import numpy as np
import pytest

from worker_node.domain import Device
from worker_node.engines.generation_continuous import ContinuousRunner
from worker_node.engines.messages import EngineSpec, Failed, GenerateJob, Step

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


def test_interactive_work_goes_before_batch_work_that_came_first(runner):
    """GenAI has some of the batch already; the interactive request passes all that it has not."""
    long = np.arange(100, 400, dtype="<i4")
    batch = range(10, 18)
    for job_id in batch:
        runner.submit(GenerateJob(job_id, np.roll(long, job_id).tobytes(), 1, FAR, ignore_eos=True, interactive=False))
    finished = []
    while not finished:
        finished += ended(step(runner))
    runner.submit(GenerateJob(9, np.roll(long, 9).tobytes(), 1, FAR, ignore_eos=True))
    while runner.has_work:
        finished += ended(step(runner))
    assert sorted(finished) == [9, *batch]
    assert finished.index(9) < 5
    assert [job_id for job_id in finished if job_id != 9] == list(batch)


def test_what_waits_in_line_can_be_cancelled_and_expires(runner):
    prompt = np.arange(100, 400, dtype="<i4").tobytes()
    for job_id in (21, 22, 23):
        runner.submit(GenerateJob(job_id, prompt, 1, FAR, ignore_eos=True))
    runner.submit(GenerateJob(24, prompt, 1, 0.0, ignore_eos=True))
    runner.submit(GenerateJob(25, prompt, 1, FAR, ignore_eos=True))
    runner.cancel(25)
    events = step(runner)
    assert [(e.id, e.code) for e in events if isinstance(e, Failed)] == [(24, "deadline_exceeded")]
    finished = ended(events)
    while runner.has_work:
        finished += ended(step(runner))
    assert finished == [21, 22, 23]


def ended(events):
    return [delta.id for event in events if isinstance(event, Step) for delta in event.deltas if delta.finish]
