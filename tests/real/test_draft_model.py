"""A draft model: with exact arithmetic the same greedy answers as without, in fewer steps; sampled ones never fail.

The model has two of SmolLM2's layers and its draft one of them, so that guesses are right now and then: what is guessed
and verified does not depend on the number of layers.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from tests.real.test_prompt_lookup import EXACT, FAR, JOBS, job
from tests.support.cut_model import WRITER, cut
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec, Failed
from worker_node.models.directory import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from worker_node.tasks.generate.continuous import ContinuousRunner
from worker_node.tasks.generate.messages import GenerateJob, Step

pytestmark = pytest.mark.real

GREEDY = [name for name in JOBS if name != "sampled"]
# As the plan of a model with a draft has it.
BESIDE_A_DRAFT = {"enable_prefix_caching": False, "dynamic_split_fuse": False, "max_num_batched_tokens": 8192}


class Engine:
    """A loaded runner; `steps` are those that it made."""

    def __init__(self, path, **options):
        spec = EngineSpec("m", "a kind", str(path), Device.CPU, "", {"plugin_config": EXACT} | options)
        self.runner = ContinuousRunner(spec)
        self.runner.load()
        self.steps = 0

    def answers(self, jobs, cancel=frozenset()):
        """The tokens and the log probabilities of each answer by the job's id; those in `cancel` end after a while."""
        tokens, logprobs = {each.id: [] for each in jobs}, []
        for each in jobs:
            self.runner.submit(each)
        while self.runner.has_work:
            for event in self.step():
                assert not isinstance(event, Failed), event
                for delta in event.deltas if isinstance(event, Step) else ():
                    tokens[delta.id] += delta.tokens
                    logprobs += delta.logprobs or []
                    if delta.id in cancel:
                        self.runner.cancel(delta.id)
        return tokens, logprobs

    def step(self):
        events = []
        self.runner.step(events.append, lambda: None)
        self.steps += 1
        return events


@pytest.fixture(scope="module")
def writer(quick_models):
    return Path(quick_models["NPU_NODE_MODEL_STORE"]) / WRITER


@pytest.fixture(scope="module")
def engines(writer, tmp_path_factory):
    draft = tmp_path_factory.mktemp("drafts") / "draft"
    left_out = (MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE)
    shutil.copytree(writer, draft, ignore=lambda _directory, _names: left_out)
    cut(writer / MODEL_FILE, draft / MODEL_FILE, layers_kept=1)
    engines = [Engine(writer), Engine(writer, draft_model=str(draft), **BESIDE_A_DRAFT)]
    yield engines
    for engine in engines:
        engine.runner.close()


def test_greedy_answers_are_the_same_with_every_parameter_and_beside_others(engines):
    plain, drafted = engines
    jobs = [job(number, name) for number, name in enumerate(GREEDY)]
    (expected, known), (given, told) = plain.answers(jobs), drafted.answers(jobs)
    assert given == expected
    np.testing.assert_allclose(told, known, atol=1e-3)


def test_right_guesses_take_fewer_steps(engines):
    made = []
    for engine in engines:
        before = engine.steps
        engine.answers([job(1, "log probabilities")])
        made.append(engine.steps - before)
    assert made[1] < 0.9 * made[0]


def test_sampled_and_cancelled_answers_leave_greedy_ones_beside_them_as_they_are(engines):
    """With GenAI's prefix cache the third sampled answer or so ended the engine."""
    plain, drafted = engines
    chance = random.Random(1)
    tokens = np.arange(100, 500, dtype="<i4")
    jobs = []
    for number in range(24):
        length, limit = chance.choice([1, 15, 16, 17, 60, 300]), chance.choice([1, 2, 5, 12])
        sampled = {"temperature": 0.8, "seed": number} if number % 2 else {}
        limit = 24 if sampled else limit
        prompt = tokens[:length].tobytes()
        jobs.append(GenerateJob(number, prompt, limit, FAR, ignore_eos=True, **sampled))
    cancelled = frozenset(range(0, 24, 5))
    expected, _ = plain.answers([each for each in jobs if not each.temperature])
    given, _ = drafted.answers(jobs, cancel=cancelled)
    for each in jobs:
        if each.id in cancelled:
            continue
        assert len(given[each.id]) == each.max_new_tokens
        if not each.temperature:
            assert given[each.id] == expected[each.id]
    stats = drafted.runner.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert not drafted.runner.has_work


@pytest.mark.parametrize("precision", ["bf16", "f32"])
def test_a_cache_in_the_precision_that_the_model_is_computed_in_answers(writer, precision):
    """As the plan has it; beside another precision of computing the first request would end the engine."""
    if precision == "bf16" and "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(RuntimeError, match="needs a CPU that computes in bf16"):
            Engine(writer, kv_cache_precision=precision)
        return
    engine = Engine(writer, kv_cache_precision=precision, plugin_config={"INFERENCE_PRECISION_HINT": precision})
    answers, _ = engine.answers([job(1, "penalty")])
    assert len(answers[1]) == 20
    engine.runner.close()
