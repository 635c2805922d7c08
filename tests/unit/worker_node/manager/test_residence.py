"""How long models stay in memory, who shares a load, and who is refused: the manager over a clock that jumps."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.support.scripted_engines import Machine, ScriptedEngine, scripted_model
from tests.unit.worker_node.manager.jumping import in_worlds_of, manager_over
from worker_node.core.errors import DeadlineExceeded, InsufficientMemory
from worker_node.core.types import RequestContext
from worker_node.engines.protocol import EngineState
from worker_node.manager.served import ModelState
from worker_node.serving.routing import Demand, select_placement
from worker_node.serving.run import Execution

MB = 10**6


class Case:
    """Models by name, each with one engine on the CPU unless others are given."""

    def __init__(self):
        self.machine = Machine()
        self.clock = asyncio.get_running_loop().time
        self.budget = None
        self.models = []

    async def begin(self):
        """Each test starts the manager over models of its own."""

    def add(self, name, devices=("CPU",), *, pinned=False, idle_unload_s=None, **engine):
        engines = [ScriptedEngine(name, device, self.machine, **engine) for device in devices]
        model = scripted_model(name, engines, self.clock, pinned=pinned, idle_unload_s=idle_unload_s)
        self.models.append(model)
        return model

    def start(self):
        self.manager = manager_over(self.models, self.machine, self.clock, self.budget)
        self.manager.start()

    async def request(self, model, seconds=60.0, **more):
        context = RequestContext("req_1", self.clock(), self.clock() + seconds, **more)
        with model.activity.working():
            return await select_placement(Demand(model.id, model.placements, 1, 1), context)

    async def serve(self, model, device):
        demand = Demand(model.id, model.placements, 1, 1, require=device)
        context = RequestContext("req_1", self.clock(), self.clock() + 60)
        with model.activity.working():
            selection = await select_placement(demand, context)
            with Execution(demand, context, selection).admitted() as execution:
                async with execution.attempt(SimpleNamespace(id=0), SimpleNamespace) as results:
                    await anext(results)

    async def load(self, model, seconds=60.0):
        placement = model.placements[0]
        placement.request_load(on_request=True, insist=False)
        await placement.settled(self.clock() + seconds)


def state(model, index=0):
    return model.placements[index].engine.state


in_world = in_worlds_of(Case)


@in_world()
async def test_a_model_is_unloaded_when_it_was_idle_for_so_long(case):
    model = case.add("m", pinned=True)
    case.start()
    await case.load(model)
    case.manager.keep(model, 60)
    await asyncio.sleep(59)
    assert state(model) is EngineState.READY
    assert case.manager.expires_in(model) == pytest.approx(1)
    await asyncio.sleep(2)
    assert state(model) is EngineState.UNLOADED
    assert case.manager.expires_in(model) is None


@in_world()
async def test_the_time_counts_from_the_end_of_the_last_request(case):
    model = case.add("m", idle_unload_s=60.0)
    case.start()
    await asyncio.sleep(100)
    await case.load(model)
    await asyncio.sleep(30)
    assert state(model) is EngineState.READY, "without a request it counts from the end of the load"
    with model.activity.working():
        await asyncio.sleep(100)
        assert case.manager.expires_in(model) == 60, "in use: the time has not begun"
        with model.activity.working():
            await asyncio.sleep(10)
        await asyncio.sleep(10)
    await asyncio.sleep(59)
    assert state(model) is EngineState.READY, "it became idle 59 s ago and stays for 60"
    await asyncio.sleep(2)
    assert state(model) is EngineState.UNLOADED


@in_world()
async def test_a_model_in_use_or_being_loaded_is_unloaded_afterwards(case):
    model = case.add("m", load_s=10.0)
    case.start()
    with model.activity.working():
        loading = asyncio.create_task(case.load(model))
        await asyncio.sleep(1)
        case.manager.unload(model)
        await loading
        await asyncio.sleep(100)
        assert state(model) is EngineState.READY
    await asyncio.sleep(1)
    assert state(model) is EngineState.UNLOADED


@in_world()
async def test_a_request_that_comes_just_after_the_decision_to_unload_keeps_the_model(case):
    model = case.add("m")
    case.start()
    await case.load(model)
    case.manager.unload(model)
    await asyncio.sleep(0)
    assert model.placements[0].unloading, "it was decided"
    with model.activity.working():
        await asyncio.sleep(100)
        assert state(model) is EngineState.READY
    await asyncio.sleep(1)
    assert state(model) is EngineState.UNLOADED


@in_world()
async def test_waiters_share_a_load_and_each_keeps_its_own_deadline(case):
    model = case.add("m", load_s=10.0)
    case.start()
    began = case.clock()
    impatient = asyncio.create_task(case.load(model, 3.0))
    others = [asyncio.create_task(case.load(model, 60.0)) for _ in range(20)]
    with pytest.raises(DeadlineExceeded):
        await impatient
    assert case.clock() == pytest.approx(began + 3)
    await asyncio.gather(*others)
    assert case.clock() == pytest.approx(began + 10)
    assert model.placements[0].engine.loads == 1


@in_world()
async def test_one_load_at_a_time_on_a_device_in_the_order_of_asking(case):
    first, second, third = (case.add(name, load_s=10.0) for name in "abc")
    elsewhere = case.add("d", ("NPU",), load_s=10.0)
    case.start()
    waits = []
    for model in (second, first, third, elsewhere):
        waits.append(asyncio.create_task(case.load(model)))
        await asyncio.sleep(0.1)
    assert [m.state() for m in (first, second, third, elsewhere)] == [ModelState.LOADING] * 4
    assert [state(m) for m in (first, third)] == [EngineState.UNLOADED] * 2
    assert [state(m) for m in (second, elsewhere)] == [EngineState.STARTING] * 2
    await asyncio.gather(*waits)
    assert [name for what, name, *_ in case.machine.events] == ["b", "d", "a", "c"]


@pytest.mark.parametrize("used", [0, 1])
@in_world()
async def test_of_a_models_placements_the_one_that_requests_used_stays_when_another_model_needs_memory(case, used):
    case.budget = 250 * MB
    model, wanted = case.add("m", ("NPU", "CPU"), size=100 * MB), case.add("wanted", size=100 * MB)
    case.start()
    for placement in model.placements:
        placement.request_load(on_request=True)
        await placement.settled(case.clock() + 60)
    await asyncio.sleep(1)
    await case.serve(model, model.placements[used].device)
    await case.load(wanted)
    expected = [EngineState.UNLOADED, EngineState.UNLOADED]
    expected[used] = EngineState.READY
    assert [state(model, index) for index in (0, 1)] == expected


@in_world()
async def test_a_model_that_was_just_loaded_stays_before_one_that_requests_used_earlier(case):
    case.budget = 250 * MB
    used, loaded, wanted = (case.add(name, size=100 * MB) for name in ("used", "loaded", "wanted"))
    case.start()
    await case.load(used)
    await case.serve(used, "CPU")
    await asyncio.sleep(1)
    await case.load(loaded)
    await asyncio.sleep(1)
    await case.load(wanted)
    assert (state(used), state(loaded)) == (EngineState.UNLOADED, EngineState.READY)


@in_world()
async def test_a_request_waits_for_memory_as_long_as_the_load_could_end_in_time_and_is_told_what_holds_it(case):
    case.budget = 150 * MB
    busy, wanted = case.add("busy", size=100 * MB), case.add("wanted", size=100 * MB)
    case.start()
    await case.load(busy)
    holders = r"the budget for models is 150 MB, of which these hold: busy on CPU 100 MB \(in use\)\. .*memory_budget"
    began = case.clock()
    with busy.activity.working():
        with pytest.raises(InsufficientMemory, match=holders):
            await case.request(wanted, restart_wait_s=0.0)
        assert case.clock() == began, "a caller who can go elsewhere is refused at once"
        load_s = wanted.placements[0].ready_in()
        with pytest.raises(InsufficientMemory, match=holders):
            await case.request(wanted, 20.0)
        assert case.clock() == pytest.approx(began + 20 - load_s), "with less than the time of a load left"
        patient = asyncio.create_task(case.request(wanted))
        await asyncio.sleep(5)
        assert not patient.done()
    place = await patient
    assert place.loading_s == pytest.approx(6)
    assert (state(busy), state(wanted)) == (EngineState.UNLOADED, EngineState.READY)


@in_world()
async def test_a_model_larger_than_the_budget_is_refused_at_once_whatever_time_there_is(case):
    case.budget = 50 * MB
    wanted = case.add("wanted", size=100 * MB)
    case.start()
    began = case.clock()
    with pytest.raises(InsufficientMemory, match=r"50 MB, and nothing else holds any of it\. Raise memory_budget"):
        await case.request(wanted)
    with pytest.raises(InsufficientMemory, match="Raise memory_budget"):
        await case.request(wanted, 0.5)
    assert case.clock() == began


@in_world()
async def test_a_load_that_nobody_waits_for_any_more_is_not_begun(case):
    first, second, third = case.add("a", load_s=10.0), case.add("b"), case.add("c")
    case.start()
    loading = asyncio.create_task(case.load(first))
    waiting = [asyncio.create_task(case.load(second)), asyncio.create_task(case.request(third))]
    await asyncio.sleep(1)
    assert third.state() is ModelState.LOADING
    for each in waiting:
        each.cancel()
    await loading
    await asyncio.sleep(10)
    for model in (second, third):
        assert (model.placements[0].engine.loads, model.state()) == (0, ModelState.UNLOADED)


@in_world()
async def test_the_next_placement_is_loaded_once_when_an_engine_goes_down(case):
    model = case.add("m", ("NPU", "CPU"), pinned=True, failures=[True])
    model.placements[1].engine.failures = []
    case.start()
    await asyncio.sleep(10)
    assert (state(model), state(model, 1)) == (EngineState.FAILED, EngineState.READY)
    case.manager.unload(model)
    await asyncio.sleep(10)
    assert state(model, 1) is EngineState.UNLOADED, "it does not come back by itself"
