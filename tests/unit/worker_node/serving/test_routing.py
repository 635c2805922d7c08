"""Where a request runs: the decision, the wait for an engine, the explanation."""

import asyncio
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDied,
    EngineUnavailable,
    ModelLoading,
    NodeError,
    Overloaded,
    UnsupportedParameter,
)
from worker_node.core.types import Device, RequestContext
from worker_node.engines.protocol import EngineState, EngineStatus, Loaded
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving.routing import Demand, PlacementStatus, choose, select_placement
from worker_node.serving.run import Execution

NPU = PlacementStatus(Device.NPU, prompt_limit=1024, total_limit=1152)
GPU = PlacementStatus(Device.GPU, prompt_limit=4096, total_limit=4096)
CPU = PlacementStatus(Device.CPU, prompt_limit=8192, total_limit=8192)


def route(*statuses, prompt_tokens=10, min_new_tokens=1, needs=frozenset(), require=None):
    """The index and the reason of the route. Raises the refusal."""
    decision = choose(Demand("m", (), prompt_tokens, prompt_tokens, min_new_tokens, require, needs), statuses)
    if decision.error is not None:
        raise decision.error
    return decision.index, decision.reason


@pytest.mark.parametrize("feature", ["n", "logprobs"])
def test_what_a_placement_cannot_do_goes_to_the_next_that_can(feature):
    npu = replace(NPU, lacks=frozenset({"n", "logprobs"}))
    assert route(npu, CPU, needs=frozenset({feature})) == (1, "unsupported_on_npu")
    assert route(npu, CPU) == (0, "preferred")
    with pytest.raises(UnsupportedParameter) as caught:
        route(npu, CPU, needs=frozenset({feature}), require=Device.NPU)
    assert caught.value.param == feature
    with pytest.raises(ContextLengthExceeded, match="8192"):
        route(npu, CPU, needs=frozenset({feature}), prompt_tokens=9000)
    with pytest.raises(UnsupportedParameter):
        route(npu, needs=frozenset({feature}))


def test_the_reason_names_the_device_that_was_skipped_first():
    gpu = replace(GPU, lacks=frozenset({"n"}))
    assert route(gpu, CPU, prompt_tokens=5000) == (1, "context_exceeds_gpu")
    assert route(gpu, CPU, needs=frozenset({"n"})) == (1, "unsupported_on_gpu")
    assert route(NPU, gpu, CPU, prompt_tokens=5000) == (2, "context_exceeds_npu")
    assert route(replace(CPU, prompt_limit=10), GPU, prompt_tokens=11) == (1, "context_exceeds_cpu")


features = st.frozensets(st.sampled_from(["n", "logprobs"]))
statuses = st.builds(
    PlacementStatus,
    st.sampled_from(Device),
    st.integers(1, 100),
    st.integers(1, 100),
    obstacle=st.sampled_from([None, "device_unavailable", "device_quarantined", "model_loading"]),
    lacks=features,
)


@given(
    st.lists(statuses, min_size=1, max_size=4),
    st.integers(0, 120),
    st.integers(0, 120),
    features,
    st.none() | st.sampled_from(Device),
)
def test_the_route_is_the_first_that_can_or_a_typed_refusal(placements, prompt, new, needs, require):
    able = [
        i
        for i, c in enumerate(placements)
        if c.obstacle is None
        and prompt <= c.prompt_limit
        and prompt + new <= c.total_limit
        and not needs & c.lacks
        and require in {None, c.device}
    ]
    try:
        index, _ = route(*placements, prompt_tokens=prompt, min_new_tokens=new, needs=needs, require=require)
    except NodeError:
        assert not able
    else:
        assert index == able[0]


class Engine:
    """Changes its state when `set` says so; it only starts by itself, when it is woken."""

    def __init__(self, state, load_seconds=1.0, *, served=False, retry_after=None):
        self.state = state
        self.load_seconds = load_seconds
        self.served = served
        self.retry_after = retry_after
        self.woken = 0
        self.changed = asyncio.Event()

    @property
    def ready(self):
        return self.state is EngineState.READY

    @property
    def status(self):
        known = self.load_seconds is not None and (self.served or self.state is not EngineState.BACKING_OFF)
        loaded = Loaded(self.load_seconds, "NPU", "2026.4") if known else None
        return EngineStatus(self.state, loaded=loaded, retry_after=self.retry_after)

    def next_change(self):
        return self.changed.wait()

    def set(self, state):
        self.state, self.retry_after = state, None
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def wake(self):
        if self.state is EngineState.UNLOADED:
            self.woken += 1
            self.set(EngineState.STARTING)


def placement(device, engine, limit):
    return Placement(device, engine, Admission("m", AdmissionLimits(8)), limit, limit)


def demand(npu, cpu, prompt_tokens=500, require=None):
    placements = [placement(Device.NPU, npu, 128), placement(Device.CPU, cpu, 8192)]
    return Demand("m", placements, prompt_tokens, prompt_tokens, 1, require)


def context(seconds=60.0, **more):
    now = time.monotonic()
    return RequestContext("req_1", now, now + seconds, **more)


async def begun(*finding):
    """Tasks that have come to where they wait."""
    tasks = [asyncio.create_task(each) for each in finding]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    ("npu", "tokens", "reason"),
    [(EngineState.READY, 500, "context_exceeds_npu"), (EngineState.QUARANTINED, 50, "device_quarantined")],
)
async def test_a_lazy_placement_is_loaded_for_requests_that_no_other_can_take(npu, tokens, reason):
    cpu = Engine(EngineState.UNLOADED)
    wanted = demand(Engine(npu), cpu, tokens)
    finding = await begun(*(select_placement(wanted, context()) for _ in range(3)))
    cpu.set(EngineState.READY)
    places = await asyncio.gather(*finding)
    assert {(place.route.device, place.route.reason) for place in places} == {(Device.CPU, reason)}
    assert cpu.woken == 1


async def test_a_request_whose_deadline_is_too_near_starts_the_load_and_is_told_when_to_come_back():
    cpu = Engine(EngineState.UNLOADED, load_seconds=100.0)
    with pytest.raises(ModelLoading) as caught:
        await select_placement(demand(Engine(EngineState.READY), cpu), context(5.0))
    assert cpu.woken == 1
    assert caught.value.retry_after == 100.0


async def test_an_eager_engine_that_is_loading_is_waited_for_and_no_other_one_is_loaded_meanwhile():
    npu, cpu = Engine(EngineState.STARTING), Engine(EngineState.UNLOADED)
    wanted = demand(npu, cpu, 50)
    (finding,) = await begun(select_placement(wanted, context()))
    assert wanted.placements[0].admission.outstanding == 1
    began = time.monotonic()
    while time.monotonic() == began:  # a tick of Windows' clock has 16 ms
        await asyncio.sleep(0)
    npu.set(EngineState.READY)
    place = await finding
    assert (place.route.device, place.route.reason, cpu.woken) == (Device.NPU, "preferred", 0)
    assert place.loading_s > 0


async def test_a_cold_compile_for_the_npu_is_not_waited_for_but_begun_while_another_placement_is_loaded():
    npu, cpu = Engine(EngineState.UNLOADED, load_seconds=None), Engine(EngineState.UNLOADED)
    wanted = demand(npu, cpu, 50)
    wanted.placements[0].cold = True
    (finding,) = await begun(select_placement(wanted, context()))
    assert (npu.woken, cpu.woken) == (1, 1)
    cpu.set(EngineState.READY)
    place = await finding
    assert (place.route.device, place.route.reason) == (Device.CPU, "model_loading")
    required = demand(npu, cpu, 50, require=Device.NPU)
    required.placements[0].cold = True
    with pytest.raises(ModelLoading):
        await select_placement(required, context(3600.0))


@pytest.mark.parametrize("state", [EngineState.UNLOADED, EngineState.STARTING, EngineState.BACKING_OFF])
async def test_no_more_requests_wait_for_an_engine_than_the_queue_has_places(state):
    engine = Engine(state, served=state is EngineState.BACKING_OFF)
    wanted = Demand("m", [placement(Device.CPU, engine, 1024)], 100, 100)
    waiting = await begun(*(select_placement(wanted, context(), units=units) for units in (2, 3, 1, 1, 1)))
    with pytest.raises(Overloaded):
        await select_placement(wanted, context())
    engine.set(EngineState.READY)
    await asyncio.gather(*waiting)
    assert wanted.placements[0].admission.outstanding == 0


# An engine that served, died and is started again: in 0.5 s, to be loaded in 1 s


def restarting(state=EngineState.BACKING_OFF, **more):
    engine = Engine(state, served=True, retry_after=0.5 if state is EngineState.BACKING_OFF else None, **more)
    return engine, Demand("m", [placement(Device.CPU, engine, 1024)], 100, 100)


@pytest.mark.parametrize("state", [EngineState.BACKING_OFF, EngineState.STARTING])
async def test_a_request_that_comes_while_the_engine_is_started_again_waits_for_it(state):
    engine, wanted = restarting(state)
    (finding,) = await begun(select_placement(wanted, context()))
    assert wanted.placements[0].admission.outstanding == 1
    engine.set(EngineState.STARTING)
    await asyncio.sleep(0.02)  # longer than a tick of Windows' clock
    engine.set(EngineState.READY)
    place = await finding
    assert (place.route.device, place.route.reason) == (Device.CPU, "preferred")
    assert place.loading_s > 0
    assert wanted.placements[0].admission.outstanding == 0


@pytest.mark.parametrize("limits", [{"seconds": 1.4}, {"restart_wait_s": 0.0}, {"restart_wait_s": 1.4}])
async def test_a_restart_that_is_likely_to_outlast_the_wait_of_a_caller_is_refused_at_once_with_its_end(limits):
    _, wanted = restarting()
    with pytest.raises(EngineUnavailable) as caught:
        await select_placement(wanted, context(**limits))
    assert caught.value.retry_after == 1.5


async def test_a_restart_that_takes_longer_than_expected_ends_the_wait_at_the_deadline():
    _, wanted = restarting(EngineState.STARTING, load_seconds=0.001)
    with pytest.raises(DeadlineExceeded):
        await select_placement(wanted, context(0.05))
    with pytest.raises(ModelLoading):
        await select_placement(wanted, context(restart_wait_s=0.05))
    assert wanted.placements[0].admission.outstanding == 0


class Dying(Engine):
    """Dies of a request, and takes longer to start again than was expected."""

    recoveries = 0

    async def run(self, _job, _result):
        self.state = EngineState.STARTING
        raise EngineDied("the engine died")
        yield


@pytest.mark.parametrize(
    ("waits", "error"), [({"restart_wait_s": 0.05}, EngineDied), ({"seconds": 0.05}, DeadlineExceeded)]
)
async def test_a_retry_that_may_wait_no_longer_reports_the_death_and_the_deadline_only_when_it_has_passed(waits, error):
    engine = Dying(EngineState.READY, load_seconds=0.001, served=True)
    wanted, limits = Demand("m", [placement(Device.CPU, engine, 8192)], 10, 10), context(**waits)
    selection = await select_placement(wanted, limits)
    with Execution(wanted, limits, selection).admitted() as execution, pytest.raises(error):
        async with execution.attempt(None, None) as results:
            await anext(results)
