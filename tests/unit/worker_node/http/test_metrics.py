"""The metrics of each engine."""

import os
from types import SimpleNamespace

import pytest

from tests.support.application import application
from worker_node.core.types import Device
from worker_node.devices.npu import NpuSource
from worker_node.engines.protocol import EngineState, EngineStats, EngineStatus
from worker_node.http.metrics import Readings, read_models
from worker_node.manager.placement import LoadRequest, Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits

LABELS = {"model": "m", "device": "NPU"}
LIMITS = AdmissionLimits(max_outstanding=8)


def model(status, request=None, name="m", devices=(Device.NPU,)):
    placements = [
        Placement(device, SimpleNamespace(status=status), Admission(name, LIMITS), 1024, 1152, request=request)
        for device in devices
    ]
    return SimpleNamespace(id=name, placements=placements, excluded=())


def read(*models):
    found = Readings()
    read_models(found, SimpleNamespace(models=models, failed=()))
    return found.values()


def value(status, name, request=None, **labels):
    wanted = f"npu_node_{name}", LABELS | labels
    samples = (sample for family in read(model(status, request)) for sample in family.samples)
    return next((one.value for one in samples if (one.name, one.labels) == wanted), None)


def test_exactly_the_state_that_an_engine_is_in_is_one():
    status = EngineStatus(EngineState.QUARANTINED, reason="wrong answer", wrong=2, restarts=3)
    states = {state.value: value(status, "engine_state", state=state.value) for state in EngineState}
    assert states == {state.value: float(state is EngineState.QUARANTINED) for state in EngineState}
    assert value(status, "engine_ready") == 0
    assert value(status, "canary_failures_total") == 2
    assert value(status, "engine_restarts_total") == 3
    assert value(status, "canary_passed_timestamp_seconds") is None
    assert value(status, "admission_limit") == 8
    for priority in ("interactive", "batch"):
        assert value(status, "admission_outstanding_tokens", priority=priority) == 0
        assert value(status, "admission_expected_wait_seconds", priority=priority) == 0


def test_an_engine_whose_load_waits_for_its_turn_is_starting_as_in_health():
    status, request = EngineStatus(EngineState.UNLOADED), LoadRequest(since=0.0)
    assert value(status, "engine_state", request, state="starting") == 1
    assert value(status, "engine_state", request, state="unloaded") == 0


@pytest.mark.linux  # Windows counts no descriptors
def test_what_an_engine_holds_and_proved_is_told():
    status = EngineStatus(
        EngineState.READY,
        pid=os.getpid(),
        in_flight=4,
        stats=EngineStats(
            waiting=1, running=3, runs=10, rows=25, kv_cache_usage=0.5, prefix_asked_tokens=900, prefix_hit_tokens=640
        ),
        proven_at=1234.5,
    )
    assert value(status, "engine_ready") == 1
    assert value(status, "engine_in_flight") == 4
    assert value(status, "num_requests_waiting") == 1
    assert value(status, "engine_rows_total") / value(status, "engine_runs_total") == 2.5
    assert value(status, "kv_cache_usage_ratio") == 0.5
    assert value(status, "prefix_cache_asked_tokens_total") == 900
    assert value(status, "prefix_cache_hit_tokens_total") == 640
    assert value(status, "canary_passed_timestamp_seconds") == 1234.5
    assert value(status, "engine_resident_memory_bytes") > 1_000_000
    assert value(status, "engine_open_fds") >= 3


def test_the_load_of_all_models_has_vllms_names_in_one_sample_and_no_invented_cache():
    first, second = (
        EngineStatus(EngineState.READY, stats=EngineStats(waiting=waiting, running=running))
        for waiting, running in ((1, 3), (20, 40))
    )
    both = model(first, devices=(Device.NPU, Device.CPU)), model(second, name="other")
    families = {family.name: family for family in read(*both)}
    samples = {name: family.samples for name, family in families.items() if name.startswith("vllm:")}
    assert {name: [(one.labels, one.value) for one in found] for name, found in samples.items()} == {
        "vllm:num_requests_running": [({}, 46)],
        "vllm:num_requests_waiting": [({}, 22)],
    }


async def test_the_counters_of_the_npu_are_told_in_the_units_of_their_names(tmp_path):
    kernel = {"npu_busy_time_us": 1_500_000, "npu_memory_utilization": 4096, "npu_current_frequency_mhz": 1400}
    for name, count in kernel.items():
        (tmp_path / name).write_text(f"{count}\n")
    async with application() as (client, node):
        node.npu = NpuSource(emulated=False, busy_counter=tmp_path / "npu_busy_time_us", stand_in=False)
        async with client.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
    told = {"device_busy_seconds_total": "1.5", "memory_bytes": "4096.0", "frequency_hertz": "1.4e+09"}
    assert {f'npu_node_npu_{name}{{emulated="false"}} {count}' for name, count in told.items()} <= {*lines}
