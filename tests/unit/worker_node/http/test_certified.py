"""What passports say of each placement, wherever a node shows them."""

import asyncio
import math
from dataclasses import replace

import openvino as ov
import pytest

from tests.support.application import application
from tests.support.passports import certify, check
from worker_node import server
from worker_node.core.types import Device
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.serving.build import Machine, build_model, configured_model
from worker_node.settings import ModelSettings, NodeSettings

MODEL = "all-minilm-l6-v2"
DRIVER = {"NPU_DRIVER_VERSION": "1.32", "DEVICE_ARCHITECTURE": "4000"}
FAULT = "[[fault]]\nkind = 'garbage'\ndevice = 'NPU'\nbeyond_tokens = 500\n"


@pytest.fixture
def machine(store, tmp_path):
    npu = NpuSource(emulated=False, busy_counter=tmp_path / "busy", stand_in=False)
    (tmp_path / "faults.toml").write_text(FAULT)
    settings = NodeSettings(
        model_store=store.root,
        passports=tmp_path / "passports",
        compile_cache=tmp_path / "compiled",
        allow_faults=True,
        faults=tmp_path / "faults.toml",
    )
    probe = Probe((DeviceInfo("NPU", DRIVER), DeviceInfo("CPU")), "2026.4")
    return Machine(settings, probe, npu)


@pytest.fixture
def installed(store):
    return store.get(MODEL)


def served(machine, installed):
    return build_model(installed, ModelSettings(name=MODEL), machine)


async def shown(model, path, settings=None):
    async with application([model], settings) as (client, _), client.get(path) as reply:
        return await reply.json() if "json" in reply.content_type else await reply.text()


@pytest.mark.parametrize(
    ("verdict", "state", "reason", "limit"),
    [
        (None, "not certified", "npu-node certify has not been run", 256),
        ({}, "certified", "", 256),
        ({"verdict": "limited", "limits": {"max_prompt_tokens": 96}}, "limited", "96 tokens", 96),
        ({"other": {"driver": "1.30"}}, "expired", "driver", 256),
    ],
)
async def test_each_placement_has_its_state_its_reason_and_its_limit(machine, installed, verdict, state, reason, limit):
    if verdict is not None:
        certify(machine, installed, **verdict)
    model = served(machine, installed)
    [health] = (await shown(model, "/health"))["models"]
    [listed] = (await shown(model, "/models"))["models"][:1]
    openai = await shown(model, f"/v1/models/{MODEL}")
    for on_npu, on_cpu in (health["engines"], listed["devices"], openai["devices"]):
        assert (on_npu["device"], on_npu["certified"], on_npu["prompt_limit"]) == ("NPU", state, limit)
        assert reason in on_npu["certified_reason"]
        assert on_npu["certified_limit"] == (limit if state == "limited" else None)
        assert (on_cpu["device"], on_cpu["certified"]) == ("CPU", "not certified")
    assert health["excluded"] == listed["excluded"] == []
    assert openai["object"] == "model"


async def test_a_placement_that_failed_is_shown_though_it_is_not_used(machine, installed):
    certify(machine, installed, verdict="failed", checks=[check("canary", "failed"), check("load", "passed")])
    model = served(machine, installed)
    health = (await shown(model, "/health"))["models"][0]
    assert [engine["device"] for engine in health["engines"]] == ["CPU"]
    [excluded] = health["excluded"]
    assert (excluded["device"], excluded["certified"], excluded["emulated"]) == ("NPU", "failed", False)
    assert "canary" in excluded["certified_reason"]
    assert "load" not in excluded["certified_reason"]
    assert excluded["reason"].startswith("its certification failed")
    assert (await shown(model, f"/models/{MODEL}"))["excluded"] == [excluded]
    metrics = await shown(model, "/metrics")
    assert f'npu_node_certified{{device="NPU",model="{MODEL}",state="failed"}} 1.0' in metrics
    assert f'npu_node_certified{{device="NPU",model="{MODEL}",state="certified"}} 0.0' in metrics
    assert f'npu_node_certified{{device="CPU",model="{MODEL}",state="not certified"}} 1.0' in metrics


async def test_a_model_that_no_device_may_run_says_what_each_lacks(machine, installed):
    strict = machine.settings.model_copy(update={"require_certified": True})
    certify(machine, installed, other={"driver": "1.30"})
    failed = configured_model(ModelSettings(name=MODEL), replace(machine, settings=strict))
    assert [(place.device, place.standing.state) for place in failed.excluded] == [
        (Device.NPU, "expired"),
        (Device.CPU, "not certified"),
    ]
    async with application([failed]) as (client, _):
        async with client.get("/health") as reply:
            [model] = (await reply.json())["models"]
        async with client.get("/models") as reply:
            [listed] = [model for model in (await reply.json())["models"] if model["state"] == "failed"]
        async with client.get("/metrics") as reply:
            metrics = await reply.text()
    for described in (model, listed):
        assert [place["certified"] for place in described["excluded"]] == ["expired", "not certified"]
    assert f'npu_node_certified{{device="NPU",model="{MODEL}",state="expired"}} 1.0' in metrics


def test_a_passport_made_under_faults_says_nothing_of_the_device_without_them(machine, installed):
    certify(machine, installed)
    without = replace(machine, settings=machine.settings.model_copy(update={"faults": None}))
    states = [served(each, installed).placements[0].standing.state for each in (machine, without)]
    assert states == ["certified", "expired"]


async def test_a_passport_expires_with_the_first_load_after_an_update(machine, installed, monkeypatch):
    """A node that runs sees the new OpenVINO, and neither its state nor its limit is of the passport any more."""
    lazy = ModelSettings(name=MODEL, placements=[{"device": "CPU", "load": "lazy"}])
    settings = machine.settings.model_copy(update={"models": (lazy,), "faults": None})
    probes = [Probe((DeviceInfo("CPU"),), version) for version in ("2026.9", ov.get_version())]
    before = Machine(settings, probes[0], machine.npu)
    certify(before, installed, lazy, device=Device.CPU, verdict="limited", limits={"max_prompt_tokens": 96})

    async def probe():
        return probes.pop(0) if len(probes) > 1 else probes[0]

    def standing(place):
        return place.standing.state, place.prompt_limit

    monkeypatch.setattr(server, "probe", probe)
    profile = server.Profile(starts_parts=False)
    async with server.hosted_node(settings, profile) as node, asyncio.timeout(60):
        place = node.manager.models[0].placements[0]
        assert standing(place) == ("limited", 96)
        while not place.engine.ready:
            place.request_load()
            await place.engine.next_change()
            place = (await node.manager.resolve(MODEL, math.inf)).placements[0]
        assert standing(place) == ("expired", 256)
        assert node.probe is probes[0]
