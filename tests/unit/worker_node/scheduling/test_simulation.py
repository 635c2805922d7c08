"""The scheduler in deterministic simulation: the real runner and admission, a virtual clock, a scripted pipeline.

`make test` runs 25 random scenarios, --long 120, and
`SIMULATED_SCENARIOS=5000 pytest --timeout 0 …/test_simulation.py -k random` more than both.
"""

import os
import random

import pytest

from tests.unit.worker_node.scheduling.virtual import Request, SequenceWorld

pytestmark = pytest.mark.slow

SCENARIOS = os.environ.get("SIMULATED_SCENARIOS")


def callers(world, count, make, rng, *, pause=0.001, until):
    def caller():
        while True:
            request = yield make(rng)
            yield request.retry_after if request.outcome == "refused" else rng.expovariate(1 / pause)

    for _ in range(count):
        world.call(caller(), at=rng.random() * pause)
    world.run(until)
    return world


def one_by_one(requests):
    """A caller that sends these requests, each when the one before is answered."""
    for request in requests:
        _ = yield request


def eight(_rng):
    return SequenceWorld(sequences=8, step_s=0.01, token_s=1e-3)


def plenty(_rng):
    return SequenceWorld(sequences=256, step_s=0.01, token_s=1e-3)


def generation(prompt, answer, limit=4096, **more):
    return Request(prompt, answer=answer, limit=limit, **more)


# A step of 256 tokens.
STEP_S = 0.27
STEADY = {
    "eight at a time": (eight, 30, 60, lambda r: generation(r.randint(10, 500), r.randint(1, 300))),
    "eight at a time, short or long": (
        eight,
        30,
        150,
        lambda r: generation(r.randint(10, 500), 1 if r.random() < 0.9 else 2000),
    ),
    "long prompts": (plenty, 60, 120, lambda r: generation(r.randint(10, 3000), 10, 50)),
    "long streams beside short answers": (
        plenty,
        30,
        40,
        lambda r: generation(50, 300 if r.random() < 0.3 else 5),
    ),
}


@pytest.mark.parametrize("mix", STEADY, ids=list(STEADY))
def test_in_steady_load_the_predicted_wait_is_within_a_factor_of_two(mix):
    world_of, count, until, make = STEADY[mix]
    rng = random.Random(1)
    world = callers(world_of(rng), count, make, rng, until=until)
    settled = [r for r in world.requests if r.started is not None and r.predicted is not None and r.arrived > until / 3]
    # What batch work waits for interactive work that comes later is not foreseen.
    interactive = [request for request in settled if request.interactive]
    assert len(interactive) > 20
    # A step is what nobody can look into.
    waited = sum(request.waited for request in interactive) / len(interactive) + STEP_S
    predicted = sum(request.predicted for request in interactive) / len(interactive) + STEP_S
    assert 0.5 < predicted / waited < 2, (predicted, waited)


def test_long_answers_do_not_make_an_idle_engine_look_busy():
    """The old estimate, finished requests a second, ran away during every long answer: true wait 1 s, estimate 101."""
    rng = random.Random(5)
    world = SequenceWorld(sequences=64, step_s=0.02, token_s=1e-4, max_wait_s=30)
    for _ in range(10):
        world.call(one_by_one(generation(50, 2000, timeout=300.0) for _ in range(3)))
    callers(world, 4, lambda r: generation(20, r.randint(1, 5), 16, timeout=5.0), rng, pause=0.5, until=40)
    assert {request.outcome for request in world.requests} == {"done"}
    assert max(request.predicted or 0.0 for request in world.requests) < 1.0


def first_tokens(world):
    at = {}
    emit = world.emit

    def noting(event):
        for delta in getattr(event, "deltas", ()):
            at.setdefault(delta.id, delta.at)
        emit(event)

    world.emit = noting
    return at


@pytest.mark.parametrize("interactive", [True, False], ids=["interactive", "batch"])
@pytest.mark.parametrize(("count", "prompt", "answer"), [(6, 8000, 50), (50, 3000, 100)])
def test_a_chat_begins_within_three_steps_whatever_long_prompts_wait(interactive, count, prompt, answer):
    world = SequenceWorld(sequences=64, step_s=0.02, token_s=2e-3, max_wait_s=1e6)
    at = first_tokens(world)
    long = [generation(prompt, answer, answer, interactive=interactive) for _ in range(count)]
    chats = [generation(40, 16, 64, timeout=30.0) for _ in range(100)]
    for request in long:
        world.call(one_by_one([request]))
    for second, chat in enumerate(chats):
        world.call(one_by_one([chat]), at=float(second))
    world.run(5000)
    assert {request.outcome for request in chats + long} == {"done"}, "and long prompts are not starved"
    ids = {request: job_id for job_id, request in world.jobs.items()}
    # The step that runs, one that the oldest prompt is owed, and its own.
    assert max(at[ids[chat]] - chat.arrived for chat in chats) <= 3 * (0.02 + 256 * 2e-3)


@pytest.mark.parametrize("interactive", [True, False], ids=["long", "batch"])
def test_endless_short_prompts_leave_a_fifth_to_the_oldest_prompt(interactive):
    world = SequenceWorld(sequences=64, step_s=0.02, token_s=2e-3)
    oldest = generation(8000, 1, 1, interactive=interactive)

    def flood():
        while True:
            yield generation(200, 1, 1)

    world.call(one_by_one([oldest]))
    for _ in range(20):
        world.call(flood())
    world.run(300)
    alone = 8000 / 256 * (0.02 + 256 * 2e-3)
    assert alone * 3 < oldest.ended < alone * 6


def test_in_overload_requests_are_refused_and_those_admitted_are_served_in_time():
    rng = random.Random(6)
    world = eight(rng)
    callers(world, 200, lambda r: generation(r.randint(10, 200), 20, 20, timeout=8.0), rng, pause=0.1, until=60)
    settled = [request for request in world.requests if request.arrived > 20]
    admitted = [request for request in settled if request.outcome != "refused"]
    in_time = [request for request in admitted if request.outcome == "done" and request.ended <= request.deadline]
    assert len(admitted) < len(settled) / 2
    assert len(in_time) / len(admitted) > 0.97


def random_scenario(seed):
    """A world with a mix of everything, run to its end."""
    rng = random.Random(seed)
    world = SequenceWorld(
        sequences=rng.choice([1, 2, 8, 64]),
        step_s=10 ** rng.uniform(-3, -1),
        token_s=10 ** rng.uniform(-5, -3),
        max_outstanding=rng.choice([20, 100, 10**6]),
        max_wait_s=rng.choice([0.5, 5.0, 1e6]),
    )

    def caller():
        for _ in range(rng.randint(1, 5)):
            yield generation(
                rng.choice([1, 50, 600]),
                rng.randint(1, 250),
                rng.choice([1, 16, 200]),
                interactive=rng.random() < 0.6,
                timeout=rng.choice([0.05, 1.0, 10.0, 1e6]),
                cancel_after=rng.uniform(0, 1) if rng.random() < 0.2 else None,
            )
            yield rng.expovariate(5)

    for _ in range(rng.randint(1, 30)):
        world.call(caller(), at=rng.random() * 2)
    world.run(rng.uniform(1, 20))
    return world


def test_the_invariants_hold_in_random_scenarios(long):
    for seed in range(int(SCENARIOS or (120 if long else 25))):
        world = random_scenario(seed)
        try:
            check_nothing_is_left(world)
            check_deadlines(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def check_nothing_is_left(world):
    assert all(request.outcome for request in world.requests)
    admission = world.admission
    assert (admission.outstanding, admission.prefilling, admission.decoding) == (0, {}, {})
    assert admission.expected_wait() == 0.0
    stats = world.runner.stats()
    assert (stats.waiting, stats.running) == (0, 0)


def check_deadlines(world):
    for at, job_id in world.runs:
        assert world.jobs[job_id].deadline > at, "started too late"
    for request in world.requests:
        if request.last_token is not None:
            assert request.last_token <= request.deadline + world.step_s + world.token_s * (world.step_tokens + 64)
