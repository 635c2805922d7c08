"""The continuous generation engine itself, without a process around it.

On two of the model's layers where no answer is compared: what is scheduled does not depend on their number.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec, NativeCall
from worker_node.models.store import ModelStore
from worker_node.tasks.generate.continuous import ContinuousRunner
from worker_node.tasks.generate.messages import GenerateJob, Step

pytestmark = pytest.mark.real

FAR = 1e12


@pytest.fixture(scope="module")
def runner(quick_models):
    installed = ModelStore(Path(quick_models["NPU_NODE_MODEL_STORE"])).get("smollm2-135m-instruct")
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
    return [event for event in events if not isinstance(event, NativeCall)]


def test_a_step_announces_its_tokens_and_jobs(runner):
    events = []
    runner.submit(GenerateJob(7, np.arange(100, 400, dtype="<i4").tobytes(), 2, FAR, ignore_eos=True))
    while runner.has_work:
        runner.step(events.append, lambda: None)
    calls = [event for event in events if isinstance(event, NativeCall)]
    # It is announced when the pipeline takes it: what goes wrong then is not the last step's.
    begun = [call for call in calls if call.stage == "begin"]
    assert calls[0] == begun[0]
    assert {tuple(call.jobs) for call in begun} == {(7,)}
    calls = [call for call in calls if call not in begun]
    # 300 tokens of the prompt in steps of at most 256; then a token a step.
    assert [(call.stage, call.jobs) for call in calls] == [("step", [7])] * len(calls)
    assert calls[0].units == 257
    assert calls[-1].units == 1


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
    """GenAI has some of the batch already, and finishes what it has begun."""
    long = np.arange(100, 400, dtype="<i4")
    batch = range(10, 18)
    for job_id in batch:
        runner.submit(GenerateJob(job_id, np.roll(long, job_id).tobytes(), 1, FAR, ignore_eos=True, interactive=False))
    finished = []
    while not finished:
        finished += ended(step(runner))
    before = len(finished)
    runner.submit(GenerateJob(9, np.roll(long, 9).tobytes(), 1, FAR, ignore_eos=True))
    while runner.has_work:
        finished += ended(step(runner))
    assert sorted(finished) == [9, *batch]
    assert finished.index(9) <= before + 1
    assert [job_id for job_id in finished if job_id != 9] == list(batch)


def answers(runner, jobs, *, later=None):
    """The token ids of each job; `later` is submitted after the first step."""
    tokens = defaultdict(list)
    for job in jobs:
        runner.submit(job)
    while runner.has_work:
        for event in step(runner):
            assert isinstance(event, Step), event
            for delta in event.deltas:
                tokens[delta.id] += delta.tokens
        if later is not None:
            assert not tokens, "the first step finishes no prompt"
            runner.submit(later)
            later = None
    return tokens


def test_a_seed_repeats_an_answer_in_full_precision_on_one_thread_beside_other_requests(store):
    """With less, or on more threads, the numbers depend on how many tokens a step computes: docs/clients.md."""
    installed = store.get("smollm2-135m-instruct")
    config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    options = {"plugin_config": config}
    precise = ContinuousRunner(
        EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, "continuous", options)
    )
    precise.load()
    prompt = np.arange(1000, 1035, dtype="<i4").tobytes()
    sampled = {"temperature": 1.2, "top_p": 0.95, "ignore_eos": True}
    answers(precise, [GenerateJob(51, prompt, 16, FAR, seed=5, **sampled)])  # puts the prompt into the prefix cache
    alone = answers(precise, [GenerateJob(52, prompt, 16, FAR, seed=5, **sampled)])[52]
    other = np.arange(3000, 3030, dtype="<i4").tobytes()
    beside = answers(
        precise,
        [
            GenerateJob(53, other, 16, FAR, seed=9, **sampled),
            GenerateJob(54, prompt, 16, FAR, seed=5, **sampled),
            GenerateJob(55, prompt, 16, FAR, seed=6, **sampled),
        ],
    )
    precise.close()
    assert len(alone) == 16
    assert alone == beside[54] != beside[55]


def ended(events):
    return [delta.id for event in events if isinstance(event, Step) for delta in event.deltas if delta.finish]
