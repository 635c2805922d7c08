"""A thousand seeded crashes: who is run again, in what groups, who is refused. Virtual time, no engine."""

import random

import pytest

from tests.unit.worker_node.hosting.crashing_engine import CRASH_LIMIT, Request, World
from worker_node.serving.run import MAX_RUNS

# 3,000 for each took minutes and found no other case.
SEEDS = 120
FAR = 1e6


def world(seed, poisonous, together=False, far=True, most=60, later=True, late=False, different=False, at_once=False):
    """Up to `most` requests of which so many are poisonous; the rest is random."""
    random_ = random.Random(f"{seed} {poisonous} {together}")
    count = random_.randint(max(2, poisonous), most)
    prefill_s, decode_s = random_.choice([0.02, 0.2, 1.0]), random_.choice([0.0, 0.5, 5.0])
    keys = [number.to_bytes(2, "little") for number in range(count)]
    spread = prefill_s * count * 2 if later else 0.01
    requests = [
        Request(
            key,
            arrives := random_.uniform(0, spread),
            FAR if far else arrives + random_.choice([0.5, 5.0, 60.0, 300.0]),
            prefill_s * random_.uniform(0.5, 2),
            decode_s * random_.uniform(0.1, 2),
        )
        for key in keys
    ]
    bad = random_.sample(keys, poisonous)
    poison = [frozenset(bad)] if together else [frozenset({key}) for key in bad]
    one = World(requests, poison, random_.choice([0.5, 5.0]), random_.random() < 0.5, random_.choice([1, 4, 16]))
    if late:
        one.poison, one.breaking_late = [], frozenset(bad)
    if different:
        first, second = bad
        one.poison, one.breaking_late = [] if at_once else [frozenset({first})], frozenset({second})
        one.breaking_at_once = frozenset({first} if at_once else ())
    if not poisonous:
        # The engine dies once, of itself.
        one.at(random_.uniform(0, spread), lambda: one.die([]) if one.up and one.board else None)
    return one.run(), set(bad)


def outcomes(one, keys=None):
    return {request.outcome for request in one.requests if keys is None or request.key in keys}


def check(one):
    """What holds in every world."""
    for request in one.requests:
        assert request.outcome is not None, "a request waits for ever"
        assert request.ended <= request.deadline
        assert request.runs <= MAX_RUNS
        assert (request.outcome == "refused") <= (request.deaths_alone >= 2), "refused, and was never alone twice"
        found = request.outcome in {"refused", "late"}
        assert (request.deaths_alone >= 2) <= found, "it may be sent to the next engine"
    assert not one.trials.inside
    assert not one.trials.waiting
    assert not +one.trials.coming


@pytest.mark.parametrize("poisonous", [0, 1, 2])
def test_the_poisonous_are_refused_and_all_others_answered(poisonous):
    for seed in range(SEEDS):
        one, bad = world(seed, poisonous)
        check(one)
        others = {request.key for request in one.requests} - bad
        assert outcomes(one, others) <= {"answered"}, seed
        assert outcomes(one, bad) <= {"refused"}, seed
        assert one.most_crashes < CRASH_LIMIT, f"{seed}: requests are to blame, and the engine is quarantined"
        assert one.crashes <= max(1 - poisonous, 0) + (poisonous == 2), f"{seed}: the engine is accused for ever"
        # With all, in a group of each size, and twice alone.
        assert len(one.deaths) <= 1 + 6 * poisonous, seed


@pytest.mark.parametrize("poisonous", [1, 2])
def test_those_that_break_the_engine_in_the_middle_of_their_answer_are_refused_too(poisonous):
    for seed in range(SEEDS):
        one, bad = world(seed, poisonous, late=True)
        check(one)
        others = {request.key for request in one.requests} - bad
        assert outcomes(one, others) <= {"answered"}, seed
        assert outcomes(one, bad) <= {"refused"}, seed
        assert one.crashes == 0 or poisonous == 2, f"{seed}: what was the requests' doing is counted for ever"
        # Two at once are told apart too late for that in one case of hundreds.
        assert one.most_crashes < CRASH_LIMIT or poisonous == 2, f"{seed}: the engine is quarantined"
        assert len(one.deaths) <= 2 + 6 * poisonous, seed


def test_two_that_break_the_engine_in_different_phases_are_both_refused_and_all_others_answered():
    """One when the engine takes it, or with its first result; the other in the middle of its answer."""
    for seed in range(SEEDS):
        for at_once in (True, False):
            one, bad = world(seed, 2, different=True, at_once=at_once)
            check(one)
            others = {request.key for request in one.requests} - bad
            assert outcomes(one, others) <= {"answered"}, seed
            assert outcomes(one, bad) <= {"refused"}, seed
            # They may be told apart too late, as two that break it late may be.
            assert len(one.deaths) <= 2 + 6 * len(bad), seed


@pytest.mark.parametrize("announced", [True, False])
def test_those_that_break_the_engine_after_their_callers_have_left_are_found_and_no_other_is_refused(announced):
    """One request is sent again and again, and each time its caller leaves before the engine dies of it."""
    for seed in range(SEEDS):
        random_ = random.Random(f"{seed} {announced}")
        prefill_s = random_.choice([0.2, 1.0, 5.0])
        bad = b"bad"
        innocent = [
            Request(bytes([n]), random_.uniform(0, 60), FAR, prefill_s * random_.uniform(0.1, 2), 0.5)
            for n in range(20)
        ]
        guilty = [Request(bad, at, at + prefill_s / 2, prefill_s, 1.0) for at in range(5, 600, 40)]
        batch = random_.choice([1, 4])
        one = World(innocent + guilty, [frozenset({bad})], 1.0, announced, batch).run()
        for request in one.requests:
            assert request.ended <= request.deadline
        assert {request.outcome for request in innocent} == {"answered"}, seed
        assert {request.outcome for request in guilty} <= {"late", "refused"}, seed
        assert one.most_crashes < CRASH_LIMIT, f"{seed}: the engine is quarantined"
        assert len(one.deaths) <= 8, f"{seed}: it is not found"


def test_requests_that_are_poisonous_only_together_are_answered_one_after_the_other():
    for seed in range(SEEDS):
        for poisonous in (2, 3):
            one, _ = world(seed, poisonous, together=True)
            check(one)
            assert outcomes(one) == {"answered"}, seed
            # Of three that were announced together, and nothing came of, the engine may be suspected, too.
            assert one.most_crashes < CRASH_LIMIT + (poisonous == 3), seed


@pytest.mark.parametrize("together", [False, True])
def test_deadlines_hold_whatever_happens(together):
    for seed in range(SEEDS):
        one, bad = world(seed, seed % 4, together=together, far=False)
        check(one)
        assert "refused" not in outcomes(one, {request.key for request in one.requests} - bad)


def test_an_engine_that_dies_of_every_request_is_quarantined_soon():
    for seed in range(SEEDS):
        random_ = random.Random(seed)
        requests = [Request(bytes([n]), random_.random() / 100, FAR, 0.1, 1.0) for n in range(random_.randint(8, 60))]
        one = World(requests, [frozenset({request.key}) for request in requests], batch=4)

        def die(step, left, one=one, die=one.die):
            die(step, left)
            if one.crashes == CRASH_LIMIT:
                one.up, one.requests = False, []
                one._events.clear()

        one.die = die
        one.run()
        assert one.crashes == CRASH_LIMIT, f"{seed}: it is started for ever"
        assert len(one.deaths) <= 12, seed
