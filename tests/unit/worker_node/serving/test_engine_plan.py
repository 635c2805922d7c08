"""The engine and the limits of a placement: its plan, its admission, the growth of its memory."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.devices.memory import MachineMemory
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import Probe
from worker_node.models.directory import InstalledModel
from worker_node.serving import build
from worker_node.serving.build import Machine, plan_engine, plan_model
from worker_node.serving.task import served_task
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.tasks.generate.building import GENERATE

EMULATED = NpuSource(emulated=True, busy_counter=Path("/proc/1/fd/3"), stand_in=True)


def model(kind=ModelKind.GENERATION, context_limit=8192, **more):
    return InstalledModel("m", kind, Path("/m"), context_limit, "int4_sym", "smollm", **more)


def plan(installed, device=Device.NPU, limit=1800, **wanted):
    machine = Machine(NodeSettings(npu_token_limit=limit), Probe((), "test"), EMULATED)
    target = machine.target(installed, ModelSettings(name="m", **wanted), device)
    return plan_engine(served_task(installed.kind), target, PlacementSettings(device=device), machine)


def test_limits_of_generation_on_the_npu():
    default = plan(model())
    assert (default.prompt_limit, default.total_limit) == (1024, 1152)
    longer = plan(model(), max_prompt_len=4096, min_response_len=512)
    assert (longer.prompt_limit, longer.total_limit) == (1800, 4608), "the threshold bounds the prompt, not the answer"
    assert plan(model(), max_prompt_len=4096, limit=5000).prompt_limit == 4096
    assert plan(model(max_prompt_len=512)).options.max_prompt_len == 512
    short = plan(model(context_limit=700))
    assert (short.prompt_limit, short.total_limit) == (700, 700)
    with pytest.raises(ConfigurationError, match="max_prompt_len is 9000"):
        plan(model(), max_prompt_len=9000)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_cache_in_a_precision_that_goes_with_no_other_makes_the_cpu_compute_in_it(precision):
    properties = plan(model(), Device.CPU, kv_cache_precision=precision).options.properties()
    assert properties == {"KV_CACHE_PRECISION": precision, "INFERENCE_PRECISION_HINT": precision}
    on_gpu = plan(model(), Device.GPU, kv_cache_precision=precision).options.properties()
    assert "INFERENCE_PRECISION_HINT" not in on_gpu


def test_a_cache_in_u4_on_the_cpu_needs_a_fixed_size():
    """When it grew, OpenVINO corrupted the heap of the engine process."""
    machine = Machine(NodeSettings(), Probe((), "test"), EMULATED)
    place = PlacementSettings(device=Device.CPU, plugin_config={"KV_CACHE_PRECISION": "u4"})
    with pytest.raises(ConfigurationError, match="u4 must have a fixed size"):
        plan(model(), Device.CPU, kv_cache_precision="u4")
    target = machine.target(model(), ModelSettings(name="m"), Device.CPU)
    with pytest.raises(ConfigurationError, match="u4 must have a fixed size"):
        plan_engine(GENERATE, target, place, machine)
    assert plan(model(), Device.CPU, kv_cache_precision="u4", cache_size_gb=1).options.kv_cache_precision == "u4"
    assert plan(model(), Device.GPU, kv_cache_precision="u4").options.kv_cache_precision == "u4"


def notes(installed, *devices, **wanted):
    """The notes of the last placement."""
    machine = Machine(NodeSettings(npu_emulation=True), Probe((), "test"), EMULATED)
    settings = ModelSettings(name="m", placements=devices, **wanted)
    plans, excluded = plan_model(served_task(installed.kind), installed, settings, machine)
    assert not excluded
    return list(plans[-1].notes)


def test_what_an_engine_ignores_is_named():
    ignored = "{} is ignored: the engine for {} has no use for it".format
    wanted = {"cache_size_gb": 1, "max_prompt_len": 64}
    assert notes(model(), "CPU", "NPU", **wanted) == [ignored("cache_size_gb", "NPU")]
    assert notes(model(), "NPU", "CPU", **wanted) == []
    assert notes(model(), "CPU", **wanted) == [ignored("max_prompt_len", "CPU")], "nothing else uses it"
    assert notes(model(ModelKind.EMBEDDING, 512), "NPU", streams=2) == [ignored("streams", "NPU")]


@pytest.mark.parametrize(
    ("device", "budget", "set_", "tokens"),
    [
        (Device.CPU, None, {}, 16_384),
        (Device.CPU, 16 * 46_080 * 5000, {}, 5000),  # a sixteenth of the budget
        (Device.CPU, 16 * 46_080 * 5000, {"kv_cache_precision": "f32"}, 2500),
        (Device.CPU, 16 * 46_080 * 2000, {"kv_cache_precision": "u8"}, 4000),
        (Device.CPU, None, {"prefix_cache_tokens": 77}, 77),
        (Device.CPU, 10**9, {"cache_size_gb": 1}, 2**30 // 46_080),
        (Device.GPU, None, {}, 0),
    ],
)
def test_the_prefix_cache_is_sized_by_the_model_and_the_memory_budget(
    tmp_path, monkeypatch, device, budget, set_, tokens
):
    monkeypatch.setattr(build, "machine_memory", lambda: MachineMemory(2**35, 2**34))
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(shape))  # 2 * 30 * 6 * 64 values of 2 bytes a token
    installed = InstalledModel("m", ModelKind.GENERATION, tmp_path, 8192, "int4_sym", "smollm")
    machine = Machine(NodeSettings(memory_budget=budget), Probe((), "test"), EMULATED)
    target = machine.target(installed, ModelSettings(name="m", **set_), device)
    found = plan_engine(GENERATE, target, PlacementSettings(device=device), machine)
    assert found.options.prefix_cache_tokens == tokens


def test_buckets_may_be_set_up_to_the_models_limit():
    embedding = model(ModelKind.EMBEDDING, 256)
    assert plan(embedding).options.npu_buckets == (16, 24, 32, 64, 128, 256)
    short = plan(embedding, npu_buckets=[128, 16], npu_batch_size=4)
    assert (short.options.npu_buckets, short.options.npu_batch_size, short.prompt_limit) == ((16, 128), 4, 128)
    with pytest.raises(ConfigurationError, match="a bucket of 512"):
        plan(embedding, npu_buckets=[512])


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_chunk_size": 100},
        {"placements": ["NPU", "NPU"]},
        {"placements": []},
        {"placements": [{"device": "NPU", "plugin_config": {"NPUW_DEVICES": "NPU,CPU"}}]},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        ModelSettings(name="m", **wrong)


def test_texts_are_counted_as_the_npu_pads_them():
    embedding = model(ModelKind.EMBEDDING, 256)
    limits = plan(embedding, npu_buckets=[32, 64, 256], npu_batch_size=4).admission
    assert [limits.computed_tokens(count) for count in (1, 32, 33, 256)] == [32, 32, 64, 256]
    assert limits.step_tokens == 4 * 256
    assert plan(embedding, Device.CPU).admission.computed_tokens(33) == 33
