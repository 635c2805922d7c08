"""A device that answers garbage never serves: a model's own canary, on a scripted engine beside a real one."""

import time
from contextlib import asynccontextmanager

import pytest

from tests.faults.engines.test_engine_faults import until
from tests.support.scripted_runner import RUNNER
from tests.support.services import services_of
from worker_node.core.errors import DeviceUnavailable
from worker_node.core.types import Device, RequestContext
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import Engine
from worker_node.manager.placement import Placement
from worker_node.manager.served import ModelState
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.generate.building import GenerationModel, generation_canary
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import GenerationRequest, Message
from worker_node.tasks.generate.service import generate
from worker_node.tasks.generate.tokenization import ChatTokenizer

pytestmark = pytest.mark.real
CONTINUOUS = "worker_node.tasks.generate.continuous:ContinuousRunner"


@asynccontextmanager
async def garbage_before_real(store):
    """SmolLM2 on an NPU that answers garbage, then on the real CPU, which is lazy."""
    installed = store.get("smollm2-135m-instruct")
    chat = ChatTokenizer(installed.path, installed.context_limit)
    canary = generation_canary(installed.canary, chat)
    placements = []
    for device, runner, options in ((Device.NPU, RUNNER, {"garbage_after": 0}), (Device.CPU, CONTINUOUS, {})):
        spec = EngineSpec(installed.id, installed.kind, str(installed.path), device, runner, options)
        engine = Engine(spec, canary, EngineLimits())
        admission, first = Admission("m", AdmissionLimits(8)), device is Device.NPU
        placements.append(Placement(device, engine, admission, 8192, 8192, on_demand=not first, eager=first))
    services = services_of([GenerationModel(installed, chat, placements=placements)])
    services.manager.start()
    try:
        yield services
    finally:
        await services.manager.stop()


def request(**more):
    now = time.monotonic()
    context = RequestContext("req_1", now, now + 100, **more)
    return GenerationRequest(context, (Message("user", "What is the capital of France?"),), Sampling(max_new_tokens=24))


async def test_garbage_keeps_a_device_from_being_ready_and_moves_traffic(store):
    async with garbage_before_real(store) as services:
        (model,) = services.manager.models
        npu, cpu = (placement.engine for placement in model.placements)
        assert model.state() is ModelState.LOADING
        status = await until(npu, EngineState.QUARANTINED)
        assert status.reason == "its known question was answered wrongly: the answer lacks 'Paris'"
        assert await until(cpu, EngineState.READY), "the next placement is made ready meanwhile"
        async with generate(services, request()) as run:
            assert (run.execution.route.device, run.execution.route.reason) == (Device.CPU, "device_quarantined")
            finished = [event async for _, events, _ in run.events for event in events][-1]
        assert "Paris" in finished.text()
        assert model.state() is ModelState.DEGRADED
        with pytest.raises(DeviceUnavailable, match="its known question was answered wrongly"):
            async with generate(services, request(require_device=Device.NPU)):
                pass
