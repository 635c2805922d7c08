"""Placements on demand: loaded for the request that needs them, waited for if its deadline allows."""

import asyncio
import time

import pytest

from worker_node.domain import Device, RequestContext
from worker_node.engines.base import EngineState, EngineStatus
from worker_node.errors import DeadlineExceeded, EngineUnavailable, ModelLoading
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving.places import Demand, Explained, explain, find_place


class Engine:
    """Goes from unloaded to `becomes` when its load is let finish."""

    def __init__(self, state, becomes=EngineState.READY, load_seconds=1.0):
        self.state = state
        self.becomes = becomes
        self.load_seconds = load_seconds
        self.woken = 0
        self.loading_done = asyncio.Event()

    @property
    def status(self):
        return EngineStatus(self.state, load_seconds=self.load_seconds)

    def wake(self):
        if self.state is EngineState.UNLOADED:
            self.woken += 1
            self.state = EngineState.STARTING

    async def settled(self):
        await self.loading_done.wait()
        self.state = self.becomes
        return self.status


def placement(device, engine, limit, *, on_demand=False):
    admission = Admission("m", AdmissionLimits(8))
    return Placement(device, engine, admission, limit, limit, on_demand=on_demand)


def demand(npu, cpu, prompt_tokens=500, require=None):
    placements = [placement(Device.NPU, npu, 128), placement(Device.CPU, cpu, 8192, on_demand=True)]
    return Demand("m", placements, prompt_tokens, prompt_tokens, 1, require)


def context(seconds=60.0, **more):
    now = time.monotonic()
    return RequestContext("req_1", now, now + seconds, **more)


async def test_a_request_that_only_a_lazy_placement_holds_has_it_loaded_and_waits():
    cpu = Engine(EngineState.UNLOADED)
    finding = [asyncio.create_task(find_place(demand(Engine(EngineState.READY), cpu), context())) for _ in range(3)]
    while not cpu.woken:
        await asyncio.sleep(0)
    cpu.loading_done.set()
    places = await asyncio.gather(*finding)
    assert {(place.route.device, place.route.reason) for place in places} == {(Device.CPU, "context_exceeds_npu")}
    assert cpu.woken == 1


async def test_a_request_whose_deadline_is_too_near_starts_the_load_and_is_told_when_to_come_back():
    cpu = Engine(EngineState.UNLOADED, load_seconds=100.0)
    with pytest.raises(ModelLoading) as caught:
        await find_place(demand(Engine(EngineState.READY), cpu), context(5.0))
    assert cpu.woken == 1
    assert caught.value.retry_after == 100.0


async def test_a_load_that_outlasts_the_deadline_is_not_waited_for_longer():
    cpu = Engine(EngineState.UNLOADED, load_seconds=0.001)
    with pytest.raises(DeadlineExceeded):
        await find_place(demand(Engine(EngineState.READY), cpu), context(0.05))


async def test_a_load_that_fails_is_told():
    cpu = Engine(EngineState.UNLOADED, becomes=EngineState.FAILED)
    cpu.loading_done.set()
    with pytest.raises(EngineUnavailable):
        await find_place(demand(Engine(EngineState.READY), cpu), context())


async def test_what_the_npu_holds_wakes_nothing_else():
    cpu = Engine(EngineState.UNLOADED)
    place = await find_place(demand(Engine(EngineState.READY), cpu, prompt_tokens=50), context())
    assert (place.route.device, place.route.reason, cpu.woken) == (Device.NPU, "preferred", 0)


async def test_a_quarantined_npu_has_the_lazy_placement_loaded():
    cpu = Engine(EngineState.UNLOADED)
    cpu.loading_done.set()
    place = await find_place(demand(Engine(EngineState.QUARANTINED), cpu, prompt_tokens=50), context())
    assert (place.route.device, place.route.reason) == (Device.CPU, "device_quarantined")


async def test_an_eager_engine_that_is_loading_is_not_waited_for():
    with pytest.raises(ModelLoading):
        await find_place(
            demand(Engine(EngineState.STARTING), Engine(EngineState.READY), 50, require=Device.NPU), context()
        )


async def test_a_dry_run_decides_as_after_the_load_that_would_be_waited_for_and_loads_nothing():
    cpu = Engine(EngineState.UNLOADED)
    with pytest.raises(Explained) as caught:
        await find_place(demand(Engine(EngineState.READY), cpu), context(dry_run=True))
    explanation = caught.value.explanation
    assert explanation.refusal is None
    assert (explanation.route.device, explanation.route.reason) == (Device.CPU, "context_exceeds_npu")
    assert explanation.loads
    assert [candidate.obstacle for candidate in explanation.candidates] == [None, "model_loading"]
    assert cpu.woken == 0


async def test_a_dry_run_with_no_time_for_the_load_is_a_refusal():
    cpu = Engine(EngineState.UNLOADED, load_seconds=100.0)
    explanation = explain(demand(Engine(EngineState.READY), cpu), context(5.0))
    assert isinstance(explanation.refusal, ModelLoading)
    assert (explanation.route, explanation.loads, cpu.woken) == (None, False, 0)


async def test_one_who_asked_to_wait_waits_for_an_eager_engine_too():
    npu = Engine(EngineState.STARTING)
    npu.loading_done.set()
    wanted = demand(npu, Engine(EngineState.QUARANTINED), 50)
    waiting = context(wait_for_load=True)
    assert explain(wanted, waiting).route.device is Device.NPU
    assert isinstance(explain(wanted, context()).refusal, ModelLoading)
    place = await find_place(wanted, waiting)
    assert place.route.device is Device.NPU
    assert place.loading_s > 0


async def test_the_explanation_is_the_decision():
    wanted = demand(Engine(EngineState.READY), Engine(EngineState.READY))
    assert explain(wanted, context()).route == (await find_place(wanted, context())).route
