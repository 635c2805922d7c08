"""What /health says, and to whom."""

from types import SimpleNamespace

import pytest

from tests.support.application import application
from tests.support.task_models import RANKER, placement, ranker
from worker_node.core.types import Device
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http.health import node_status, status_reason
from worker_node.node import NodeState
from worker_node.settings import NodeSettings
from worker_node.tasks.embed.service import EmbeddingModel

READY, STARTING, BACKING_OFF = EngineState.READY, EngineState.STARTING, EngineState.BACKING_OFF
FAILED, QUARANTINED, UNLOADED = EngineState.FAILED, EngineState.QUARANTINED, EngineState.UNLOADED


def node(draining=False, **models):
    served = []
    for name, states in models.items():
        placements = [
            SimpleNamespace(
                device=device,
                state=state,
                reason=f"it is {state}",
                engine=SimpleNamespace(status=EngineStatus(state, f"it is {state}")),
            )
            for device, state in zip((Device.NPU, Device.CPU), states, strict=False)
        ]
        installed = SimpleNamespace(id=name, aliases=(), prompts={}, matryoshka=())
        served.append(EmbeddingModel(installed, None, "s", 1, placements=placements))
    state = NodeState(0.0)
    state.draining = draining
    return SimpleNamespace(manager=SimpleNamespace(models=tuple(served), failed=[]), state=state)


@pytest.mark.parametrize(
    ("models", "status"),
    [
        ({"a": [READY, FAILED]}, "ready"),
        ({"a": [UNLOADED], "b": [READY]}, "ready"),
        ({"a": [READY], "b": [STARTING]}, "degraded"),
        ({"a": [READY], "b": [FAILED]}, "degraded"),
        ({"a": [QUARANTINED, READY]}, "degraded"),
        ({"a": [QUARANTINED, UNLOADED]}, "degraded"),
        ({"a": [BACKING_OFF]}, "starting"),
        ({"a": [FAILED], "b": [STARTING]}, "starting"),
        ({"a": [FAILED], "b": [QUARANTINED]}, "failed"),
    ],
)
def test_a_node_is_degraded_as_soon_as_any_model_serves(models, status):
    assert node_status(node(**models)) == status


def test_the_reason_names_the_models_that_do_not_serve_as_configured():
    reason = status_reason(node(a=[READY], b=[STARTING], c=[QUARANTINED, READY]))
    assert reason == "b is loading: it is starting; c is degraded on CPU: it is quarantined"
    assert status_reason(node(a=[READY], b=[UNLOADED])) is None


def test_a_draining_node_says_so_whatever_its_models_do():
    wanted = node(draining=True, a=[READY])
    assert (node_status(wanted), status_reason(wanted)) == ("draining", "the node is shutting down")


PRIVATE = {"devices", "models", "npu", "uptime_s"}
ONE, TWO = "one-0123456789abcdef", "two-0123456789abcdef"


async def told(keys, headers, *, draining=False):
    async with application(settings=NodeSettings(api_keys=keys)) as (client, node):
        node.state.draining = draining
        async with client.get("/health", headers=headers) as reply:
            return reply.status, set(await reply.json())


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Bearer {ONE[:-1]}", f"Bearer {ONE}s", f"Basic {ONE}", ONE, "Bearer"]
)
@pytest.mark.parametrize(("draining", "status"), [(False, 200), (True, 503)])
async def test_without_a_key_only_the_status_and_the_version_are_told(header, draining, status):
    headers = {} if header is None else {"Authorization": header}
    assert await told((ONE, TWO), headers, draining=draining) == (status, {"status", "version"})


@pytest.mark.parametrize(("keys", "headers"), [((), {}), ((ONE, TWO), {"Authorization": f"Bearer {TWO}"})])
async def test_key_holders_and_callers_of_a_node_without_keys_are_told_all(keys, headers):
    status, fields = await told(keys, headers)
    assert status == 200
    assert fields >= PRIVATE


async def test_a_models_requests_are_those_on_all_of_its_devices(store):
    engine = SimpleNamespace(status=EngineStatus(READY))
    first, second = (placement(RANKER, engine) for _ in range(2))
    first.admission.outstanding, second.admission.outstanding = 9, 10
    async with application([ranker(store, [first, second])]) as (client, _):
        (model,) = (await (await client.get("/health")).json())["models"]
    assert first.admission.limits.parallel == 8
    assert (model["in_flight"], model["queue_depth"]) == (19, 3)


async def test_the_devices_have_every_property_or_the_reason_why_not(tmp_path):
    async with application((), NodeSettings(model_store=tmp_path)) as (client, node):
        properties = {"FULL_DEVICE_NAME": "Intel(R) AI Boost", "NPU_DRIVER_VERSION": None}
        npu = DeviceInfo("NPU", properties, {"NPU_DRIVER_VERSION": "the driver does not answer"})
        node.probe = Probe((npu,), "2026.4.1")
        body = await (await client.get("/health/devices")).json()
    counters = body.pop("npu_counters")
    shown = {
        "FULL_DEVICE_NAME": {"value": "Intel(R) AI Boost", "reason": None},
        "NPU_DRIVER_VERSION": {"value": None, "reason": "the driver does not answer"},
    }
    assert body == {"openvino": "2026.4.1", "error": None, "devices": [{"name": "NPU", "properties": shown}]}
    assert counters.pop("emulated") is False
    assert set(counters) == {"busy_time_us", "memory_bytes", "frequency_mhz", "max_frequency_mhz", "energy_uj"}
    assert all((counter["value"] is None) == bool(counter["reason"]) for counter in counters.values())
