"""What the policy decides, over thousands of random snapshots, against an oracle that tries out every subset."""

import itertools
import random

import pytest

from worker_node.manager.policy import DoesNotFit, Unit, UnitState, Why, plan_memory

UNLOADED, LOADING, READY = UnitState.UNLOADED, UnitState.LOADING, UnitState.READY


def unit(name, state=READY, **more):
    return Unit((name, "CPU"), "CPU", "host", more.pop("memory", 100), state, **more)


def room_for(wanted, others, budget):
    """Every set of evictable units without which the wanted one fits: the oracle, by trying all of them."""
    evictable = [u for u in others if u.state is READY and not u.busy and not u.pinned]
    held = sum(u.memory for u in others if u.state is not UNLOADED)
    return [
        {u.key for u in chosen}
        for count in range(len(evictable) + 1)
        for chosen in itertools.combinations(evictable, count)
        if held - sum(u.memory for u in chosen) + wanted.memory <= budget
    ]


def random_units(rng, count):
    return [
        unit(
            f"m{number}",
            rng.choice([READY, READY, READY, UnitState.DOWN, UNLOADED]),
            memory=rng.randint(1, 200),
            last_use=rng.uniform(0, 100),
            busy=rng.random() < 0.3,
            pinned=rng.random() < 0.2,
        )
        for number in range(count)
    ]


def test_one_load_fits_is_refused_or_evicts_the_least_recently_used_as_the_oracle_says():
    rng = random.Random(7)
    outcomes = set()
    for _ in range(5_000):
        others = random_units(rng, rng.randint(0, 6))
        wanted = unit("wanted", UNLOADED, memory=rng.randint(1, 200), wanted_since=1.0)
        held = sum(u.memory for u in others if u.state is not UNLOADED)
        budget = rng.randint(max(1, held), held + 250)
        plan = plan_memory([*others, wanted], {"host": budget}, 200.0)
        possible = room_for(wanted, others, budget)
        evicted = {key for key, why in plan.unloads if why is Why.ROOM}
        assert [key for key, _ in plan.unloads if key not in evicted] == []
        if not possible:
            assert (plan.loads, evicted) == ((), set())
            assert [refusal.key for refusal in plan.refusals] == [wanted.key]
            outcomes.add("refused")
            continue
        assert plan.refusals == ()
        assert evicted in possible
        assert plan.loads == (() if evicted else (wanted.key,))
        by_use = sorted((u for u in others if u.evictable), key=lambda u: u.last_use)
        prefixes = [{u.key for u in by_use[:count]} for count in range(len(by_use) + 1)]
        assert evicted == next(prefix for prefix in prefixes if prefix in possible)
        outcomes.add("evicted" if evicted else "loaded")
    assert outcomes == {"refused", "evicted", "loaded"}


def test_beyond_the_budget_idle_units_go_until_it_is_kept_and_no_further():
    rng = random.Random(8)
    for _ in range(3_000):
        units = random_units(rng, rng.randint(1, 8))
        budget = rng.randint(1, 600)
        plan = plan_memory(units, {"host": budget}, 200.0)
        gone = [key for key, why in plan.unloads if why is Why.PRESSURE]
        left = {u.key: u for u in units if u.state is not UNLOADED and u.key not in gone}
        evictable = sorted((u for u in units if u.evictable), key=lambda u: u.last_use)
        assert gone == [u.key for u in evictable[: len(gone)]]
        held = sum(u.memory for u in left.values())
        assert held <= budget or not any(u.evictable for u in left.values())
        if gone:
            assert held + evictable[len(gone) - 1].memory > budget


def test_the_refusal_names_what_is_in_the_way():
    pinned, busy = unit("pinned", pinned=True), unit("busy", busy=True)
    wanted = unit("wanted", UNLOADED, wanted_since=1.0)
    short = DoesNotFit(wanted.key, 100, 250, (pinned.key, busy.key), waits=True)
    assert plan_memory([pinned, busy, wanted], {"host": 250}, 1.0).refusals == (short,), "it waits until that is idle"
    loading, leaving = unit("loading", LOADING, memory=80), unit("leaving", UnitState.UNLOADING, memory=20)
    plan = plan_memory(
        [loading, leaving, Unit(("wanted", "NPU"), "NPU", "host", 100, UNLOADED, wanted_since=1.0)], {"host": 150}, 1.0
    )
    assert [refusal.in_the_way for refusal in plan.refusals] == [(loading.key, leaving.key)]
    hopeless = unit("wanted", UNLOADED, wanted_since=1.0, memory=200)
    assert [r.in_the_way for r in plan_memory([pinned, busy, hopeless], {"host": 250}, 1.0).refusals] == [(pinned.key,)]


def test_a_load_that_waits_for_models_in_use_keeps_no_memory_from_others():
    busy = unit("busy", busy=True)
    large = unit("large", UNLOADED, wanted_since=1.0, memory=150)
    small = unit("small", UNLOADED, wanted_since=2.0, memory=50)
    plan = plan_memory([busy, large, small], {"host": 200}, 3.0)
    assert plan.loads == (small.key,)
    assert [refusal.key for refusal in plan.refusals if refusal.waits] == [large.key]


def test_a_load_whose_memory_is_being_freed_is_not_overtaken_by_a_later_one():
    leaving = unit("leaving", UnitState.UNLOADING, memory=150)
    first = unit("first", UNLOADED, wanted_since=1.0, memory=150)
    second = Unit(("second", "NPU"), "NPU", "host", 100, UNLOADED, wanted_since=2.0)
    assert plan_memory([leaving, first, second], {"host": 200}, 3.0).loads == ()
    assert plan_memory([first, second], {"host": 250}, 3.0).loads == (first.key, second.key)


@pytest.mark.parametrize("leaves", [{"state": UnitState.UNLOADING}, {"unload_when_idle": True, "busy": True}])
def test_no_load_is_refused_at_once_for_the_memory_of_a_pinned_unit_that_leaves(leaves):
    pinned = unit("pinned", **{"state": READY, "pinned": True} | leaves)
    wanted = unit("wanted", UNLOADED, wanted_since=1.0)
    assert all(refusal.waits for refusal in plan_memory([pinned, wanted], {"host": 150}, 1.0).refusals)


def test_the_next_decision_is_due_when_the_first_of_several_keep_alives_ends():
    kept = [unit(f"until {end}", keep_until=end) for end in (600.0, 60.0, 300.0)]
    assert plan_memory(kept, {}, 1.0).decide_at == 60.0
    assert plan_memory(kept, {}, 60.0).decide_at == 300.0
