"""Prompts that are given up while they are computed leave nothing wrong in the prefix cache, on the real pipeline.

Two of the model's layers are enough: a wrong block of the first changes what the second makes of it.
"""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec
from worker_node.models.store import ModelStore
from worker_node.scheduling.steps import BLOCK_TOKENS
from worker_node.tasks.generate.continuous import ContinuousRunner
from worker_node.tasks.generate.messages import GenerateJob, Step

pytestmark = pytest.mark.real

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
LONG = np.random.default_rng(1).integers(1000, 20000, 730).astype("<i4")
SHORT = np.random.default_rng(2).integers(1000, 20000, 55).astype("<i4")


@pytest.fixture
def runner(quick_models, request):
    installed = ModelStore(Path(quick_models["NPU_NODE_MODEL_STORE"])).get("smollm2-135m-instruct")
    options = {"plugin_config": F32, **getattr(request, "param", {})}
    runner = ContinuousRunner(
        EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, "continuous", options)
    )
    runner.load()
    yield runner
    runner.close()


def job(job_id, tokens):
    return GenerateJob(job_id, tokens.tobytes(), 8, time.monotonic() + 600, ignore_eos=True, logprobs=True)


def answers(runner, until=None):
    """The log probabilities of each answer, over all steps or so many."""
    found = {}
    while runner.has_work and until != 0:
        until = None if until is None else until - 1
        events = []
        runner.step(events.append, lambda: None)
        for event in events:
            for delta in event.deltas if isinstance(event, Step) else ():
                found.setdefault(delta.id, []).extend(delta.logprobs or [])
    return found


def test_a_cancelled_prompt_does_not_change_the_answer_to_the_next_one_alike(runner):
    decoding = [job(index, np.roll(SHORT, index)) for index in range(1, 4)]
    for each in decoding:  # their tokens shift the ends of the steps into the middle of blocks
        runner.submit(each)
    answers(runner, until=2)
    runner.submit(job(20, LONG))
    runner.submit(job(21, SHORT))
    answers(runner, until=2)
    runner.cancel(20)
    runner.cancel(21)
    answers(runner)
    runner.submit(job(30, LONG))
    runner.submit(job(31, SHORT))
    after = answers(runner)
    runner.close()
    runner.load()
    runner.submit(job(40, LONG))
    runner.submit(job(41, SHORT))
    fresh = answers(runner)
    np.testing.assert_allclose(after[30], fresh[40], atol=0.01)
    np.testing.assert_allclose(after[31], fresh[41], atol=0.01)


def test_prompts_that_others_overtake_again_and_again_give_the_answer_that_they_give_alone(runner):
    runner.submit(job(50, np.roll(SHORT, 7)))
    answers(runner, until=2)
    runner.submit(msgspec.structs.replace(job(51, LONG), interactive=False))
    for index in range(3):
        assert 51 not in answers(runner, until=1), "it is computed while the others come"
        runner.submit(job(60 + index, np.roll(SHORT, 10 + index)))
    found = answers(runner)
    runner.submit(job(52, LONG))
    found |= answers(runner)
    runner.close()
    runner.load()
    runner.submit(job(53, LONG))
    (alone,) = answers(runner).values()
    np.testing.assert_allclose(found[51], alone, atol=0.01)
    np.testing.assert_allclose(found[52], alone, atol=0.01)


@pytest.mark.parametrize("runner", [{}, {"prefix_cache_tokens": 4096, "prompt_lookup": True}], indirect=True)
def test_what_prompts_have_in_common_is_counted_as_hit(runner):
    for number in range(3):
        runner.submit(job(number, np.append(LONG, np.int32(2000 + number)).astype("<i4")))
        answers(runner)
    stats = runner.stats()
    assert stats.prefix_asked_tokens == 3 * 731
    assert stats.prefix_hit_tokens == 2 * (730 // BLOCK_TOKENS * BLOCK_TOKENS)


@pytest.mark.parametrize("runner", [{"prefix_cache_tokens": 8192}], indirect=True)
def test_a_prefix_that_other_prompts_came_after_is_found_and_takes_one_step(runner):
    def steps_to_the_first_token(job_id, tokens):
        before = runner.stats().runs
        runner.submit(msgspec.structs.replace(job(job_id, tokens), max_new_tokens=1))
        found = answers(runner)[job_id]
        return runner.stats().runs - before, found

    for number in range(4):
        steps, _ = steps_to_the_first_token(70 + number, np.roll(LONG, number))
        assert steps == 3, "of 256 tokens each"
    before = runner.stats()
    steps, again = steps_to_the_first_token(80, LONG)
    assert steps == 1
    assert runner.stats().prefix_hit_tokens - before.prefix_hit_tokens == 730 // BLOCK_TOKENS * BLOCK_TOKENS
    runner.close()
    runner.load()
    _, fresh = steps_to_the_first_token(81, LONG)
    np.testing.assert_allclose(again, fresh, atol=0.01)
