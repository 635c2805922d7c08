"""A model on two devices is changed by a reload: the first device goes on serving. Engines are scripted, time jumps;
how a request is routed, waits or is refused is the real code."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest

from tests.support.scripted_engines import Machine, ScriptedEngine, scripted_model
from tests.unit.worker_node.manager.jumping import in_worlds_of, manager_over, run_in
from worker_node.core.errors import ModelNotFound, NodeError
from worker_node.core.types import Device, RequestContext
from worker_node.engines.protocol import EngineState
from worker_node.serving.routing import Demand, select_placement

NPU, CPU = Device.NPU, Device.CPU
LONG_S = 1000.0


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    monkeypatch.setattr("worker_node.manager.replacement.gc.collect", lambda: None)


class World:
    """A node that serves `m` on the NPU and the CPU, and what a reload does: `change` replaces it by another form."""

    def __init__(self, *, budget=None, eager=False):
        self.clock, self.eager = asyncio.get_running_loop().time, eager
        self.machine = Machine()
        self.forms = 0
        first = self.form()
        self.manager = manager_over([first], self.machine, self.clock, budget)
        self.manager.start()

    async def begin(self):
        await asyncio.sleep(30)  # what is loaded with the node
        await self.request(CPU, LONG_S)

    def form(self, npu_s=3.0, cpu_s=20.0, *, lazy=False, failures=(), sizes=(100, 100)):
        """The next form of `m`. The NPU's engine takes no request for several answers, as a real one does not."""
        self.forms += 1
        name = f"form {self.forms}"
        engines = [
            ScriptedEngine(name, NPU, self.machine, size=sizes[0], load_s=npu_s, failures=failures),
            ScriptedEngine(name, CPU, self.machine, size=sizes[1], load_s=cpu_s),
        ]
        model = scripted_model("m", engines, self.clock, pinned=not lazy)
        npu, cpu = model.placements
        npu = replace(npu, lacks=frozenset({"n"}))
        if self.eager:
            cpu = replace(cpu, eager=True)
            cpu.pinned = True
        return replace(model, placements=[npu, cpu])

    @property
    def model(self):
        return self.manager.names.find("m")

    def change(self, new):
        """Replace the served form by `new`, as a reload does."""
        return asyncio.create_task(self.manager.replacement.replace(self.model, new))

    async def request(self, device=CPU, limit_s=1.0, work_s=0.0, needs=frozenset()):
        model = await self.manager.resolve("m", self.clock() + limit_s)
        context = RequestContext("r", self.clock(), self.clock() + limit_s, require_device=device)
        demand = Demand("m", model.placements, 10, 10, require=device, needs=needs)
        with model.activity.working():
            place = await select_placement(demand, context)
            engine = place.placement.engine
            engine.in_flight += 1
            try:
                await asyncio.sleep(work_s)
                assert engine.state is EngineState.READY, "the engine was taken from a request"
            finally:
                engine.in_flight -= 1
        return engine.name, place.loading_s


in_world = in_worlds_of(World)


@pytest.mark.parametrize("eager", [False, True], ids=["loaded on demand", "loaded with the node"])
@in_world()
async def test_the_first_device_never_waits_for_a_change_and_the_second_one_load(world, eager):
    changing = world.change(world.form(cpu_s=9.0))
    served = []
    while not changing.done() or len(served) < 10:
        form, waited = await world.request(NPU)
        assert waited == 0
        served.append(form)
        await asyncio.sleep(1)
    assert await changing is None
    assert served == sorted(served), "from the earlier form to the later one, once"
    assert 2 <= served.count("form 1") <= 4
    form, waited = await world.request(CPU, limit_s=10.0, needs=frozenset({"n"}))
    assert (form, waited <= 9) == ("form 2", True)
    assert len(world.machine.memory) == 2


@in_world()
async def test_a_model_that_is_loaded_on_demand_is_changed_without_a_wait_where_it_is_loaded(world):
    await world.change(world.form(lazy=True))
    assert await world.request(NPU) == ("form 2", 0)
    await asyncio.sleep(30)
    world.manager.unload(world.model)
    await asyncio.sleep(5)
    await world.change(world.form(lazy=True))
    assert not world.machine.memory, "what was not loaded is not loaded for a change"


@pytest.mark.parametrize("eager", [False, True], ids=["loaded on demand", "loaded with the node"])
@in_world(budget=350)
async def test_where_memory_holds_only_one_of_them_requests_wait_for_the_later_form(world, eager):
    """Two forms on the NPU and one on the CPU fit."""
    began = world.clock()
    assert await world.change(world.form()) is None
    assert world.clock() - began == 3.0
    if eager:
        form, waited = await world.request(limit_s=21.0)
        assert (form, 19 <= waited <= 21) == ("form 2", True)
    else:
        assert (await world.request(limit_s=LONG_S))[0] == "form 2"
    assert len(world.machine.memory) == 2


@in_world()
async def test_a_form_that_cannot_be_loaded_on_the_first_device_leaves_the_earlier_one(world):
    before = world.model
    problem = await world.change(world.form(failures=[True]))
    assert "could not be loaded on NPU with its new settings, and serves with the earlier ones" in problem
    assert world.model is before
    assert [await world.request(device) for device in (NPU, CPU)] == [("form 1", 0)] * 2
    assert len(world.machine.memory) == 2, "what was loaded of the later form is gone"


@in_world(budget=350)
async def test_a_form_that_memory_can_never_hold_leaves_the_earlier_one(world):
    before = world.model
    problem = await world.change(world.form(sizes=(400, 100)))
    assert (
        "m could not be loaded on NPU with its new settings, and serves with the earlier ones: m on NPU needs"
        in problem
    )
    assert "nothing else holds any of it. Raise memory_budget" in problem
    assert world.model is before
    assert [await world.request(device) for device in (NPU, CPU)] == [("form 1", 0)] * 2


@pytest.mark.parametrize("second", [3.0, 4.0, 22.0], ids=["while it loads", "when it is ready", "at the end"])
@pytest.mark.parametrize("which", [0, 1], ids=["NPU", "CPU"])
@pytest.mark.parametrize("of_the_later", [False, True], ids=["earlier form", "later form"])
@in_world()
async def test_an_engine_that_is_killed_during_a_change_costs_no_more_than_its_own_restart(
    world, monkeypatch, of_the_later, which, second
):
    old, new = world.model, world.form()
    changing = world.change(new)
    await asyncio.sleep(second - 1)
    killed = (new if of_the_later else old).placements[which].engine
    if killed.state is EngineState.STARTING:
        killed._task.cancel()
    if killed.pid is not None:
        killed._end(EngineState.BACKING_OFF)

    def restarted():
        if killed.state is EngineState.BACKING_OFF:
            killed._end(EngineState.UNLOADED)

    restart = asyncio.get_running_loop().call_later(2, restarted)
    problem = await changing
    restart.cancel()
    if problem is not None:
        assert of_the_later
        assert world.model is old
    serves = killed in [placement.engine for placement in world.model.placements]
    for device in (NPU, CPU) * (not serves):
        await world.request(device, limit_s=25.0)
    await asyncio.sleep(50)
    assert len(world.machine.memory) == 2 - (serves and killed.pid is None)


@pytest.mark.parametrize("drain", [False, True])
@in_world()
async def test_a_model_that_is_removed_during_a_change_is_gone_in_both_forms(world, drain):
    old = world.model
    changing = world.change(world.form())
    busy = asyncio.create_task(world.request(work_s=5.0 if drain else 0.0))
    await asyncio.sleep(1)
    removing = world.manager.replacement.retire(old, drain=drain)
    assert "m was removed" in await changing
    await asyncio.gather(removing, busy)
    with pytest.raises(ModelNotFound):
        world.manager.names.find("m")
    assert not world.manager.models
    assert not world.machine.memory


def test_random_changes_within_a_budget_end_and_leave_nothing_waiting(long):
    """Requests with patience are served, whichever form memory holds; each change ends."""

    def seeded(seed, budget):
        async def scenario(world):
            rng = random.Random(seed)
            over, served = asyncio.Event(), []

            async def caller():
                while not over.is_set():
                    try:
                        served.append(await world.request(rng.choice([NPU, CPU]), limit_s=200.0, work_s=0.3))
                    except NodeError as error:
                        error.add_note(f"seed {seed}, budget {budget}, at {world.clock()}")
                        raise
                    await asyncio.sleep(rng.choice([0.1, 3.0]))

            callers = [asyncio.create_task(caller()) for _ in range(2)]
            for _ in range(5):
                async with asyncio.timeout(300):
                    assert await world.change(world.form(rng.choice([1.0, 9.0]), rng.choice([1.0, 9.0]))) is None
                await asyncio.sleep(rng.choice([0.0, 5.0, 60.0]))
                assert sum(world.machine.memory.values()) <= budget
                assert not any(task.done() for task in callers), callers
            over.set()
            await asyncio.gather(*callers)
            assert served

        return scenario

    for seed in range(60 if long else 6):
        for budget in (210, 250, 310, 350, 410):
            run_in(partial(World, budget=budget), seeded(seed, budget))
