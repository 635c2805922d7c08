"""The continuous generation engine itself, without a process around it: turns, prefix cache, prompt lookup.

On two of the model's layers where no answer is compared: what is scheduled does not depend on their number.
"""

import contextlib
import math
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec, Failed, NativeCall
from worker_node.models.store import ModelStore
from worker_node.scheduling.prompts import BLOCK_TOKENS
from worker_node.tasks.generate import continuous
from worker_node.tasks.generate.continuous import ContinuousRunner
from worker_node.tasks.generate.messages import GenerateJob, Sampling, Step

pytestmark = pytest.mark.real

FAR = 1e12
# Tokens computed together are rounded otherwise than one by one; in f32 no likeliest token changes by that.
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
PROMPT = np.arange(100, 140, dtype="<i4")
LONG = np.random.default_rng(1).integers(1000, 20000, 730).astype("<i4")
SHORT = np.random.default_rng(2).integers(1000, 20000, 55).astype("<i4")


@contextlib.contextmanager
def loaded(store, **options):
    installed = store.get("smollm2-135m-instruct")
    runner = ContinuousRunner(
        EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, "continuous", options)
    )
    runner.load()
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def quick_store(quick_models):
    return ModelStore(Path(quick_models["NPU_NODE_MODEL_STORE"]))


@pytest.fixture(scope="module")
def runner(quick_store):
    with loaded(quick_store) as runner:
        yield runner


def job(number, tokens, most=8, *, interactive=True, grammar=None, **sampling):
    sampling = Sampling(ignore_eos=True, **sampling)
    return GenerateJob(number, tokens.tobytes(), most, FAR, sampling, interactive, grammar)


def step(runner):
    events = []
    runner.step(events.append, lambda: None)
    return [event for event in events if not isinstance(event, NativeCall)]


def answers(runner, *jobs, until=None):
    tokens, logprobs = defaultdict(list), defaultdict(list)
    for each in jobs:
        runner.submit(each)
    while runner.has_work and until != 0:
        until = None if until is None else until - 1
        for event in step(runner):
            assert isinstance(event, Step), event
            for delta in event.deltas:
                tokens[delta.id] += delta.tokens
                logprobs[delta.id] += delta.logprobs or []
    return tokens, logprobs


def test_a_step_announces_its_tokens_and_jobs(runner):
    events = []
    runner.submit(job(7, np.arange(100, 400, dtype="<i4"), 2))
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
    for number in (1, 2):
        runner.submit(job(number, PROMPT, 1000))
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


def test_an_answer_says_what_it_took_with_each_delta_after_which_the_edge_may_stop_it(runner):
    said = defaultdict(list)
    for number, may_stop in ((1, False), (2, True)):
        runner.submit(msgspec.structs.replace(job(number, PROMPT, 5), edge_may_stop=may_stop))
    while runner.has_work:
        for event in step(runner):
            for delta in event.deltas:
                said[delta.id].append(delta.busy is not None)
    assert said == {1: [False] * 4 + [True], 2: [True] * 5}


def test_a_stream_that_has_begun_goes_on_after_its_deadline_until_it_must_end(runner, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(continuous.time, "monotonic", lambda: now[0])
    for number, until in ((1, math.inf), (2, 100.0), (3, 0.0)):
        runner.submit(msgspec.structs.replace(job(number, PROMPT, 12), deadline=50.0, streamed_until=until))
    tokens, failures = defaultdict(int), {}
    while runner.has_work:
        for event in step(runner):
            if isinstance(event, Failed):
                failures[event.id] = now[0]
                continue
            for delta in event.deltas:
                tokens[delta.id] += len(delta.tokens)
        # All three have begun by then.
        now[0] = 60.0 if min(tokens[number] for number in (1, 2, 3)) >= 2 else now[0]
        now[0] = 100.0 if tokens[2] >= 6 else now[0]
    assert tokens[1] == 12
    assert failures == {3: 60.0, 2: 100.0}


def test_interactive_work_goes_before_batch_work_that_came_first(runner):
    """GenAI has some of the batch already, and finishes what it has begun."""
    long = np.arange(100, 400, dtype="<i4")
    batch = range(10, 18)
    for number in batch:
        runner.submit(job(number, np.roll(long, number), 1, interactive=False))
    finished = []
    while not finished:
        finished += ended(step(runner))
    before = len(finished)
    runner.submit(job(9, np.roll(long, 9), 1))
    while runner.has_work:
        finished += ended(step(runner))
    assert sorted(finished) == [9, *batch]
    assert finished.index(9) <= before + 1
    assert [number for number in finished if number != 9] == list(batch)


def test_beams_are_ranked_and_likelier_than_a_greedy_answer_beside_other_requests(quick_store):
    greedy, ranks = job(9, PROMPT, 16, logprobs=True), (0, 1, 2)
    with loaded(quick_store, plugin_config=F32, enable_prefix_caching=False, max_num_seqs=4) as runner:
        expected, alone = answers(runner, greedy)
        beams = [job(rank, PROMPT, 16, logprobs=True, beams=4, rank=rank) for rank in ranks]
        given, logprobs = answers(runner, *beams, greedy)
    assert given[9] == expected[9]
    assert {len(given[rank]) for rank in ranks} == {16}
    means = [np.mean(values) for values in (*(logprobs[rank] for rank in ranks), alone[9])]
    assert means[0] > means[1] > means[2]
    assert means[0] > means[3]


def ended(events):
    return [delta.id for event in events if isinstance(event, Step) for delta in event.deltas if delta.finish]


def test_a_seed_repeats_an_answer_in_full_precision_on_one_thread_beside_other_requests(quick_store):
    """With less, or on more threads, the numbers depend on how many tokens a step computes: docs/other-tools.md."""
    config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    prompt, other = np.arange(1000, 1035, dtype="<i4"), np.arange(3000, 3030, dtype="<i4")

    def sampled(number, tokens, seed):
        return job(number, tokens, 16, seed=seed, temperature=1.2, top_p=0.95)

    with loaded(quick_store, plugin_config=config) as precise:
        answers(precise, sampled(51, prompt, 5))  # puts the prompt into the prefix cache
        alone = answers(precise, sampled(52, prompt, 5))[0][52]
        beside, _ = answers(precise, sampled(53, other, 9), sampled(54, prompt, 5), sampled(55, prompt, 6))
    assert len(alone) == 16
    assert alone == beside[54] != beside[55]


@pytest.fixture
def exact(quick_store):
    with loaded(quick_store, plugin_config=F32, prefix_cache_tokens=8192) as runner:
        yield runner


def told(number, tokens, **options):
    return job(number, tokens, logprobs=True, **options)


def restarted(runner, *jobs):
    """The log probabilities by an engine that has seen nothing before."""
    runner.close()
    runner.load()
    return answers(runner, *jobs)[1]


def test_a_cancelled_prompt_does_not_change_the_answer_to_the_next_one_alike(exact):
    # The tokens of the answers under way take room of the step, which so ends in the middle of a block.
    answers(exact, *(told(index, np.roll(SHORT, index), most=60) for index in range(6)), until=4)
    answers(exact, told(20, LONG[:256]), until=1)
    exact.cancel(20)
    _, after = answers(exact, told(30, LONG))
    fresh = restarted(exact, told(40, LONG))
    np.testing.assert_allclose(after[30], fresh[40], atol=0.01)


def test_prompts_that_others_overtake_again_and_again_give_the_answer_that_they_give_alone(exact):
    answers(exact, told(50, np.roll(SHORT, 7)), until=2)
    exact.submit(told(51, LONG, interactive=False))
    for index in range(3):
        assert 51 not in answers(exact, until=1)[1], "it is computed while the others come"
        exact.submit(told(60 + index, np.roll(SHORT, 10 + index)))
    found = answers(exact)[1]
    found |= answers(exact, told(52, LONG))[1]
    alone = restarted(exact, told(53, LONG))[53]
    np.testing.assert_allclose(found[51], alone, atol=0.01)
    np.testing.assert_allclose(found[52], alone, atol=0.01)


def test_a_prefix_that_other_prompts_came_after_is_found_and_takes_one_step(exact):
    def steps_to_the_first_token(number, tokens):
        before = exact.stats().runs
        _, found = answers(exact, msgspec.structs.replace(told(number, tokens), max_new_tokens=1))
        return exact.stats().runs - before, found[number]

    for number in range(4):
        steps, _ = steps_to_the_first_token(70 + number, np.roll(LONG, number))
        assert steps == 3, "of 256 tokens each"
    before = exact.stats()
    steps, again = steps_to_the_first_token(80, LONG)
    assert steps == 1
    after = exact.stats()
    assert after.prefix_asked_tokens - before.prefix_asked_tokens == 730
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 730 // BLOCK_TOKENS * BLOCK_TOKENS
    exact.close()
    exact.load()
    _, fresh = steps_to_the_first_token(81, LONG)
    np.testing.assert_allclose(again, fresh, atol=0.01)


REPEATED = np.tile(PROMPT, 12)
JOBS = [
    job(0, REPEATED, 40),
    job(1, np.arange(100, 900, dtype="<i4"), 20),
    job(2, REPEATED[:50], 1),
    job(3, REPEATED[:70], 20, repetition_penalty=1.3),
    job(4, REPEATED[:70], 20, logprobs=True),
    job(5, REPEATED[:40], 20, grammar='root ::= "abababababababababab"'),
    job(6, REPEATED[:70], 20, temperature=0.8, seed=1),
]


@pytest.fixture(scope="module")
def plain_and_lookup(quick_store):
    with (
        loaded(quick_store, plugin_config=F32) as plain,
        loaded(quick_store, plugin_config=F32, prompt_lookup=True) as lookup,
    ):
        yield plain, lookup


def test_prompt_lookup_changes_no_answer_with_any_parameter_and_beside_others(plain_and_lookup):
    for jobs in (*((each,) for each in JOBS), JOBS[:4]):
        (expected, known), (given, logprobs) = (answers(runner, *jobs) for runner in plain_and_lookup)
        assert given == expected, jobs
        for number, values in known.items():
            np.testing.assert_allclose(logprobs[number], values, atol=1e-3)


def test_prompt_lookup_takes_fewer_steps_for_an_answer_that_repeats(plain_and_lookup):
    made, rows = [], []
    for runner in plain_and_lookup:
        before = runner.stats()
        tokens, _ = answers(runner, JOBS[0])
        after = runner.stats()
        made.append(after.runs - before.runs)
        rows.append(after.rows - before.rows)
    assert made[1] < 0.75 * made[0]
    # What the dashboard's "Tokens a step" divides.
    assert rows[1] < len(tokens[0]) <= rows[0]
