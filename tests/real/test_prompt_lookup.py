"""Prompt lookup: with exact arithmetic the same answers in fewer steps, alone, together and beside every parameter.

On two of the model's layers: what is guessed and verified does not depend on their number.
"""

from pathlib import Path

import numpy as np
import pytest

from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec, Failed
from worker_node.models.store import ModelStore
from worker_node.tasks.generate.continuous import ContinuousRunner
from worker_node.tasks.generate.messages import GenerateJob, Step

pytestmark = pytest.mark.real

FAR = 1e12
# Verifying several tokens at once rounds otherwise than one by one; in f32 no likeliest token changes by that.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
REPEATED = np.tile(np.arange(100, 140, dtype="<i4"), 12)
JOBS = {
    "in parts": {"tokens": REPEATED, "max_new_tokens": 40},
    "no repetition": {"tokens": np.arange(100, 900, dtype="<i4"), "max_new_tokens": 20},
    "one token": {"tokens": REPEATED[:50], "max_new_tokens": 1},
    "penalty": {"tokens": REPEATED[:70], "max_new_tokens": 20, "repetition_penalty": 1.3},
    "log probabilities": {"tokens": REPEATED[:70], "max_new_tokens": 20, "logprobs": True},
    "grammar": {"tokens": REPEATED[:40], "max_new_tokens": 20, "grammar": 'root ::= "abababababababababab"'},
    "sampled": {"tokens": REPEATED[:70], "max_new_tokens": 20, "temperature": 0.8, "seed": 1},
}


def job(number, name):
    fields = JOBS[name]
    return GenerateJob(number, deadline=FAR, ignore_eos=True, **fields | {"tokens": fields["tokens"].tobytes()})


class Engine:
    """A loaded runner; `steps` are those that it made."""

    def __init__(self, root, *, lookup):
        installed = ModelStore(root).get("smollm2-135m-instruct")
        options = {"prompt_lookup": lookup, "plugin_config": EXACT}
        self.runner = ContinuousRunner(
            EngineSpec(installed.id, installed.kind, str(installed.path), Device.CPU, "continuous", options)
        )
        self.runner.load()
        self.steps = 0

    def answers(self, *names):
        """The tokens of each answer, all jobs at the same time, and the log probabilities."""
        tokens, logprobs = {name: [] for name in names}, []
        for number, name in enumerate(names):
            self.runner.submit(job(number, name))
        while self.runner.has_work:
            for event in self.step():
                assert not isinstance(event, Failed), event
                for delta in event.deltas if isinstance(event, Step) else ():
                    tokens[names[delta.id]] += delta.tokens
                    logprobs += delta.logprobs or []
        return tokens, logprobs

    def step(self):
        events = []
        self.runner.step(events.append, lambda: None)
        self.steps += 1
        return events


@pytest.fixture(scope="module")
def engines(quick_models):
    root = Path(quick_models["NPU_NODE_MODEL_STORE"])
    engines = [Engine(root, lookup=lookup) for lookup in (False, True)]
    yield engines
    for engine in engines:
        engine.runner.close()


def test_answers_are_the_same_with_every_parameter_and_beside_others(engines):
    plain, lookup = engines
    for names in (*((name,) for name in JOBS), ("in parts", "no repetition", "one token", "penalty")):
        (expected, known), (given, told) = plain.answers(*names), lookup.answers(*names)
        assert given == expected, names
        np.testing.assert_allclose(told, known, atol=1e-3)


def test_an_answer_that_repeats_takes_fewer_steps(engines):
    made, rows = [], []
    for engine in engines:
        before, counted = engine.steps, engine.runner.stats().rows
        tokens, _ = engine.answers("in parts")
        made.append(engine.steps - before)
        rows.append(engine.runner.stats().rows - counted)
    assert made[1] < 0.75 * made[0]
    # What the dashboard's "Tokens a step" divides.
    assert rows[1] < len(tokens["in parts"]) <= rows[0]
