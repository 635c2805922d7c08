"""The model manager in thousands of random scenarios over a clock that jumps: loads, failures, idleness, pressure.

The engines are scripted; the manager, its loop and its decisions are the real ones.
"""

import asyncio
import random
from collections import Counter

from tests.support.scripted_engines import Machine, ScriptedEngine, scripted_model
from tests.unit.worker_node.manager.jumping import manager_over, run_jumping
from worker_node.core.errors import (
    DeadlineExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    InsufficientMemory,
    ModelLoading,
    Overloaded,
)
from worker_node.core.types import Device, RequestContext
from worker_node.engines.protocol import EngineState
from worker_node.serving.routing import Demand, select_placement

# A load that is let in fits by what is known: what a process takes beyond its estimate shows when it is there.
MAX_EXCESS = 40


class World:
    """One scenario: random models, then random requests, wishes and growth, while every invariant is checked."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.clock = asyncio.get_running_loop().time
        self.machine = Machine()
        self.broken = []
        self.budget = self.rng.choice([None, 250, 400, 600])
        self.models = [self._model(f"m{number}") for number in range(self.rng.randint(1, 6))]
        self.manager = manager_over(self.models, self.machine, self.clock, self.budget)
        self.working = dict.fromkeys((model.id for model in self.models), 0)
        self.answers = Counter()
        for model in self.models:
            for placement in model.placements:
                self._watch(model, placement)

    def _model(self, name):
        rng = self.rng
        devices = rng.choice([(Device.CPU,), (Device.NPU, Device.CPU), (Device.NPU,)])
        engines = []
        for device in devices:
            size = rng.randint(20, 200)
            failures = [rng.random() < 0.15 for _ in range(30)]
            load_s = rng.choice([0.1, 1.0, 5.0, 30.0])
            engines.append(ScriptedEngine(name, device, self.machine, size=size, load_s=load_s, failures=failures))
        # A damaged model never loads.
        if rng.random() < 0.1:
            engines[0].failures = [True] * 1000
        first = engines[0].size
        return scripted_model(
            name,
            engines,
            self.clock,
            pinned=rng.random() < 0.25,
            estimate=max(1, first + rng.randint(-MAX_EXCESS, MAX_EXCESS)) if len(engines) == 1 else None,
            idle_unload_s=rng.choice([None, None, 20.0]),
        )

    def placements(self):
        return [placement for model in self.models for placement in model.placements]

    def check(self, promise, text):
        """Note a broken promise; where it is noticed an exception would be lost."""
        if not promise:
            self.broken.append(text)

    def _watch(self, model, placement):
        """Check at the moment of an action, whatever the manager believes."""
        engine = placement.engine
        wake, unload = engine.wake, engine.unload

        def checked_wake():
            starting = [p.engine for p in self.placements() if p.engine.state is EngineState.STARTING]
            compiling = [other.device for other in starting if other is not engine]
            self.check(engine.device not in compiling, "two compiles on one device")
            if self.budget is not None:
                taken = sum(self.machine.memory.values()) + placement.memory
                # What others take beyond their estimates is not known before they have been looked at.
                unknown = MAX_EXCESS * len(starting)
                self.check(taken <= self.budget + unknown, f"{model.id} was let in at {taken} of {self.budget}")
            wake()

        async def checked_unload():
            self.check(not self.working[model.id], f"{model.id} has work in flight")
            return await unload()

        engine.wake, engine.unload = checked_wake, checked_unload

    async def request(self):
        """Use a random model: waits for a placement, works, and is answered by its deadline."""
        rng, model = self.rng, self.rng.choice(self.models)
        deadline = self.clock() + rng.choice([0.5, 5.0, 60.0])
        work_s = rng.choice([0.0, 0.2, 3.0])
        require = rng.choice([None, rng.choice(model.placements).device])
        demand = Demand(model.id, model.placements, 1, 1, require=require)
        context = RequestContext("r", self.clock(), deadline, restart_wait_s=rng.choice([None, None, 0.0, 2.0]))
        with model.activity.working():
            try:
                placement = (await select_placement(demand, context)).placement
            except (InsufficientMemory, ModelLoading, EngineUnavailable, DeviceUnavailable, Overloaded) as error:
                self.answers[error.code] += 1
                return
            except DeadlineExceeded:
                self.answers["late"] += 1
                return
            finally:
                assert self.clock() <= deadline + 0.001, "nobody waits beyond the deadline"
            self.working[model.id] += 1
            try:
                await asyncio.sleep(work_s)
                assert placement.engine.state is EngineState.READY, "the engine was taken from a request"
            finally:
                self.working[model.id] -= 1
            self.answers["served"] += 1

    async def wish(self):
        """Something that is not a request."""
        rng, model = self.rng, self.rng.choice(self.models)
        match rng.randrange(5):
            case 0:
                self.manager.unload(model)
            case 1:
                self.manager.keep(model, rng.choice([None, 0.0, 5.0, 30.0]))
            case 2:
                self.manager.request_load(model)
            case 3:  # its process grows or shrinks
                for pid in list(self.machine.memory):
                    if rng.random() < 0.3:
                        self.machine.memory[pid] = max(10, self.machine.memory[pid] + rng.randint(-30, 30))
            case 4:  # an engine goes down and comes back, as its supervisor lets it
                engine = rng.choice(model.placements).engine
                if engine.state is EngineState.READY and not self.working[model.id]:
                    engine._end(EngineState.BACKING_OFF)
                    await asyncio.sleep(rng.choice([0.1, 2.0]))
                    if engine.state is EngineState.BACKING_OFF:
                        engine._end(EngineState.FAILED)

    async def run(self):
        self.manager.start()
        tasks = []
        for _ in range(self.rng.randint(5, 60)):
            tasks.append(asyncio.ensure_future(self.request() if self.rng.random() < 0.8 else self.wish()))
            await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.5, 3.0, 30.0]))
        await asyncio.gather(*tasks)
        before = len(self.machine.events)
        # With nobody asking for anything the manager comes to rest, within the budget, after the last load for requests
        # that could not wait.
        await asyncio.sleep(300)
        rest = len(self.machine.events)
        await asyncio.sleep(60)
        assert len(self.machine.events) == rest, "it loads and unloads for nobody"
        assert rest - before <= 2 * len(self.placements())
        if self.budget is not None:
            evictable = [p for p in self.placements() if p.engine.state is EngineState.READY and not p.pinned]
            assert sum(self.machine.memory.values()) <= self.budget or not evictable
        assert not self.broken
        await self.manager.stop()
        assert not self.machine.memory
        assert not any(place.admission.outstanding for place in self.placements())
        return self.answers


def test_no_random_scenario_breaks_a_promise(long):
    totals = Counter(served=0, late=0, insufficient_memory=0, model_loading=0, engine_unavailable=0, npu_unavailable=0)
    for seed in range(5_000 if long else 40):

        async def scenario(seed=seed):
            return await World(seed).run()

        try:
            totals += run_jumping(scenario)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    # The scenarios are of all kinds.
    assert min(count for outcome, count in totals.items() if outcome != "overloaded") > 10, totals
