"""What a continuous-batching pipeline is given for its next steps."""

from dataclasses import dataclass

import pytest

from worker_node.scheduling.prompts import Prompt
from worker_node.scheduling.steps import (
    PrefillMeter,
    choose_prompts,
    computed_in_step,
)

STEP_TOKENS = 256


@dataclass(frozen=True)
class Job:
    id: int
    interactive: bool = True
    deadline: float = 0.0
    prompt_tokens: int = 10


def prompts(*lefts, **more):
    return [Prompt(Job(index, prompt_tokens=left, **more), left) for index, left in enumerate(lefts)]


def chosen(ranked, places=100, batch_places=100):
    return [prompt.job.id for prompt in choose_prompts(ranked, STEP_TOKENS, places=places, batch_places=batch_places)]


def test_two_steps_and_at_least_two_prompts_are_handed_over():
    assert chosen(prompts(8000, 8000, 8000)) == [0, 1]
    assert chosen(prompts(*[100] * 20)) == [0, 1, 2, 3, 4, 5]


def test_a_prompt_that_was_begun_stays_behind_the_others():
    ranked = prompts(*[100] * 20)
    ranked[19].begun = 1.0
    assert chosen(ranked) == [0, 1, 2, 3, 4, 5, 19]


def test_places_are_kept_and_those_of_batch_work():
    assert chosen(prompts(10, 10, 10), places=1) == [0]
    assert chosen(prompts(10, 10, 10), places=0) == []
    batch = prompts(10, 10, 10, interactive=False)
    assert chosen(batch, batch_places=2) == [0, 1]
    assert chosen(batch, batch_places=0) == []


def test_a_step_computes_prompts_in_order_beside_the_tokens_of_running_answers():
    assert computed_in_step([100, 8000, 50], 6, STEP_TOKENS) == [100, 150, 0]
    assert computed_in_step([100], 300, STEP_TOKENS) == [0]


def test_the_time_of_decoding_is_not_counted_as_that_of_prompts():
    meter = PrefillMeter()
    meter.stepped(0.2, 0, 6)
    meter.stepped(1.0, 150, 50)
    assert meter.take() == (150, pytest.approx(0.75))
    assert meter.take() == (0, 0.0)
