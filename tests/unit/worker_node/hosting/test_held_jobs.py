"""Who is suspected of an engine's end when callers have left it: jobs as an engine process holds them, no process."""

import msgspec
import numpy as np
import pytest

from worker_node.core.errors import EngineDied, NodeError, RequestBreaksEngine
from worker_node.core.types import Device, ModelKind
from worker_node.engines.isolation import Standing, Suspects, fingerprint
from worker_node.engines.process import HeldJobs
from worker_node.engines.protocol import EngineSpec, EngineStats, Heartbeat, NativeCall, Result
from worker_node.tasks.generate.messages import GenerateJob

SPEC = EngineSpec("m", ModelKind.GENERATION, "/", Device.CPU, "", {})
CLEAR, SUSPECT, PRIME, REFUSED = Standing.CLEAR, Standing.SUSPECT, Standing.PRIME, Standing.REFUSED
GUILTY, INNOCENT, OTHER = 1, 2, 3


class Sink:
    def __init__(self):
        self.error = None

    def put(self, item):
        self.error = item if isinstance(item, NodeError) else None


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
        self.held.called(NativeCall(stage, 1, list(numbers)))

    def leave(self, number, now=0.0):
        return self.held.leave(number, now)

    def die(self):
        self.held.engine_died("it died", blameless=False)
        return self.held.blame


def job(number):
    return GenerateJob(number, np.asarray([number], "<i4").tobytes(), max_new_tokens=1, deadline=1e12)


def standings(suspects, *numbers):
    return [suspects.standing(fingerprint(job(number))) for number in numbers]


@pytest.fixture
def suspects():
    return Suspects()


def test_a_request_that_left_while_the_engine_worked_on_it_is_to_blame_and_not_who_waited(suspects):
    for found in (PRIME, REFUSED):
        life = Life(suspects, GUILTY, INNOCENT)
        life.call(GUILTY)
        assert life.leave(GUILTY)
        life.die()
        assert standings(suspects, GUILTY, INNOCENT) == [found, CLEAR]
        assert type(life.sinks[INNOCENT].error) is EngineDied
        assert life.sinks[GUILTY].error is None
    life = Life(suspects, GUILTY)
    life.die()
    assert type(life.sinks[GUILTY].error) is RequestBreaksEngine, "when it is sent again it is known"


def test_the_crash_of_an_engine_by_a_request_that_left_is_taken_back_when_it_is_found(suspects):
    blames = []
    for _ in range(2):
        life = Life(suspects, GUILTY)
        life.call(GUILTY)
        life.leave(GUILTY)
        blames.append(life.die())
    assert [(bool(blame), blame.pardons) for blame in blames] == [(False, 0), (True, 1)]


def test_an_engine_that_tells_nothing_of_its_calls_suspects_who_left_beside_who_is_there(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.leave(GUILTY)
    life.die()
    assert standings(suspects, GUILTY, INNOCENT) == [SUSPECT, SUSPECT], "neither is alone"


def test_a_call_without_a_job_that_left_clears_it(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.call(GUILTY)
    life.leave(GUILTY)
    life.call(INNOCENT)
    life.die()
    assert standings(suspects, GUILTY, INNOCENT) == [CLEAR, PRIME]


def test_a_job_that_was_cancelled_and_is_in_the_call_all_the_same_stays_suspected(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.call(GUILTY, INNOCENT)
    life.leave(GUILTY)
    life.call(GUILTY, INNOCENT)
    life.die()
    assert standings(suspects, GUILTY, INNOCENT) == [SUSPECT, SUSPECT]


def test_an_engine_that_dies_while_it_works_on_its_canary_alone_is_nobody_elses_doing(suspects):
    for stale in (False, True):
        life = Life(suspects, INNOCENT)
        life.examine(50)
        life.call(50)
        if stale:
            life.held.release(50)  # it was answered, and what the engine did since is not known
        life.die()
        assert standings(suspects, INNOCENT) == [PRIME if stale else CLEAR]


@pytest.mark.parametrize(
    ("heartbeat", "known"),
    [
        (Heartbeat(EngineStats(), idle=True), CLEAR),
        (Heartbeat(EngineStats(running=1)), SUSPECT),
        (Heartbeat(EngineStats(oldest_run=(10, 3.0))), CLEAR),
        (Heartbeat(EngineStats(oldest_run=(10, 8.0))), SUSPECT),
    ],
    ids=["it works on nothing", "it works", "on what began later", "on what may have begun before"],
)
def test_a_heartbeat_clears_who_left_before_the_present_work_began(suspects, heartbeat, known):
    life = Life(suspects, GUILTY, INNOCENT, OTHER)
    life.leave(GUILTY, now=100.0)
    life.held.beat(heartbeat, now=105.0)
    life.die()
    assert standings(suspects, GUILTY) == [known]


def test_a_cancellation_that_the_engine_may_not_have_read_yet_clears_nobody(suspects):
    life = Life(suspects, GUILTY, INNOCENT)
    life.leave(GUILTY, now=100.0)
    life.held.beat(Heartbeat(EngineStats(), idle=True), now=100.5)
    life.die()
    assert standings(suspects, GUILTY) == [SUSPECT]


def test_who_left_and_ended_all_the_same_is_forgotten(suspects):
    life = Life(suspects, GUILTY, INNOCENT, OTHER)
    life.leave(GUILTY)
    life.leave(OTHER)
    life.held.deliver(Result(GUILTY, msgspec.Raw(b""), True))
    life.held.release(OTHER)
    life.die()
    assert standings(suspects, GUILTY, INNOCENT, OTHER) == [CLEAR, PRIME, CLEAR]


def test_of_many_who_leave_a_bounded_number_is_kept_and_those_in_the_call_first(suspects):
    life = Life(suspects, GUILTY, *range(10, 210), INNOCENT)
    life.call(GUILTY)
    life.leave(GUILTY)
    for number in range(10, 210):
        life.leave(number)
    assert len(life.held._left) == 64
    life.die()
    assert standings(suspects, GUILTY, INNOCENT) == [PRIME, CLEAR]


def test_who_left_holds_up_nothing(suspects):
    life = Life(suspects, GUILTY)
    life.leave(GUILTY)
    assert len(life.held) == 0, "the engine is idle: it can be examined and unloaded"
    assert not life.leave(GUILTY)
