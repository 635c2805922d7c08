"""Who is suspected of an engine's end when callers have left it: jobs as an engine process holds them, no process."""

import numpy as np
import pytest

from worker_node.core.errors import EngineDied, RequestBreaksEngine
from worker_node.core.types import Device, ModelKind
from worker_node.engines.isolation import Suspects, fingerprint
from worker_node.engines.process import HeldJobs
from worker_node.engines.protocol import EngineSpec, NativeCall
from worker_node.tasks.generate.messages import GenerateJob

SPEC = EngineSpec("m", ModelKind.GENERATION, "/", Device.CPU, "", {})
GUILTY, INNOCENT, OTHER = 1, 2, 3


class Sink:
    def __init__(self):
        self.error = None

    def end(self, error):
        self.error = error


class Life:
    """One life of an engine with jobs of these numbers, which are their prompts, too."""

    def __init__(self, suspects, *numbers):
        self.suspects, self.held, self.sinks = suspects, HeldJobs(SPEC, suspects), {}
        for number in numbers:
            self.add(number)

    def add(self, number):
        self.sinks[number] = Sink()
        self.held.add(job(number), self.sinks[number], suspect=True)

    def examine(self, number):
        self.held.add(job(number), Sink(), suspect=False)

    def call(self, *numbers, stage="step"):
        self.held.call = NativeCall(stage, 1, list(numbers))
        self.held.keep_called()

    def leave(self, number):
        return self.held.leave(number)

    def die(self):
        self.held.engine_died("it died", blameless=False)


def job(number):
    return GenerateJob(number, np.asarray([number], "<i4").tobytes(), max_new_tokens=1, deadline=1e12)


def suspected(suspects, *numbers):
    return [fingerprint(job(number)) in suspects for number in numbers]


@pytest.fixture
def suspects():
    return Suspects()


def test_a_request_is_blamed_after_its_caller_left_and_those_that_waited_are_not(suspects):
    for _ in range(2):
        life = Life(suspects, GUILTY, INNOCENT)
        life.call(GUILTY)
        assert life.leave(GUILTY)
        life.die()
        assert suspected(suspects, GUILTY, INNOCENT) == [True, False]
        assert type(life.sinks[INNOCENT].error) is EngineDied
        assert life.sinks[GUILTY].error is None
    life = Life(suspects, GUILTY)
    life.die()
    assert type(life.sinks[GUILTY].error) is RequestBreaksEngine, "when it is sent again it is known"


def test_without_announced_calls_all_are_suspects_also_those_whose_callers_left(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.leave(GUILTY)
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT) == [True, True]


def test_a_call_without_a_job_whose_caller_left_clears_the_job(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.call(GUILTY)
    life.leave(GUILTY)
    life.call(INNOCENT)
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT) == [False, True]


def test_a_cancelled_job_that_is_in_the_next_call_stays_suspected(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.call(GUILTY, INNOCENT)
    life.leave(GUILTY)
    life.call(GUILTY, INNOCENT)
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT) == [True, True]


def test_a_death_in_the_canary_alone_makes_no_suspects(suspects):
    life = Life(suspects, INNOCENT)
    life.examine(50)
    life.call(50)
    life.die()
    assert suspected(suspects, INNOCENT) == [False]


def test_an_idle_engine_clears_jobs_whose_callers_left(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.leave(GUILTY)
    life.held.idle()
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT) == [False, True]


def test_a_job_that_ended_after_its_caller_left_is_forgotten(suspects):
    life = Life(suspects, GUILTY, INNOCENT, OTHER)
    life.leave(GUILTY)
    life.leave(OTHER)
    for number in (GUILTY, OTHER):
        life.held.ended(number)
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT, OTHER) == [False, True, False]


def test_a_bounded_number_of_left_jobs_is_kept_those_in_the_call_first(suspects):
    life = Life(suspects, GUILTY, *range(10, 210), INNOCENT)
    life.call(GUILTY)
    life.leave(GUILTY)
    for number in range(10, 210):
        life.leave(number)
    assert len(life.held.left) == 64
    life.die()
    assert suspected(suspects, GUILTY, INNOCENT) == [True, False]


def test_a_job_whose_caller_left_does_not_keep_the_engine_busy(suspects):
    life = Life(suspects, GUILTY)
    life.leave(GUILTY)
    assert len(life.held) == 0, "the engine is idle: it can be examined and unloaded"
    assert not life.leave(GUILTY)
