"""How generation models are planned: their draft model, and the memory of a static KV cache."""

import json
from pathlib import Path

import pytest

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import NpuSource
from worker_node.models.directory import Manifest, write_manifest
from worker_node.models.store import ModelStore
from worker_node.serving.build import estimate_bytes, plan_engine
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.generate.building import GENERATE, kv_cache_bytes

NPU = NpuSource(emulated=True, busy_counter=Path("/proc/1/fd/3"), stand_in=True)
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def install(store, name, kind=ModelKind.GENERATION, weights=1000):
    directory = store / name
    directory.mkdir(parents=True)
    (directory / "openvino_model.xml").write_text("graph")
    (directory / "openvino_model.bin").write_bytes(bytes(weights))
    (directory / "config.json").write_text(json.dumps(SHAPE))
    write_manifest(
        directory,
        Manifest(
            version=1,
            id=name,
            kind=kind,
            family="f",
            context_limit=4096,
            quantization="int4_sym",
            licence="?",
            source="?",
            source_sha256={},
            files={"openvino_model.bin": weights},
            made_with={},
        ),
    )
    return ModelStore(store).get(name)


@pytest.fixture
def store(tmp_path):
    install(tmp_path, "large", weights=100_000)
    install(tmp_path, "small", weights=30_000)
    return tmp_path


def plan(store, device=Device.CPU, beside=(Device.CPU,), **wanted):
    settings = ModelSettings(name="large", **wanted)
    places = settings.placements or ()
    place = next((place for place in places if place.device is device), None)
    place = place or ModelSettings(name="x", placements=[device.value]).placements[0]
    node = NodeSettings(model_store=store)
    return plan_engine(ModelStore(store).get("large"), settings, place, beside, node, NPU)


@pytest.mark.parametrize("device", [Device.CPU, Device.GPU])
def test_a_draft_is_found_by_its_name_in_the_store_or_its_directory(store, device):
    for name in ("small", str(store / "small")):
        options = plan(store, device, draft_model=name).options
        assert (options.draft_model, options.draft_tokens) == (str(store / "small"), 4)
        assert plan(store, device, draft_model=name).chosen({"draft_model"}) == {"draft_model": str(store / "small")}
        assert GENERATE.uses(options) == (store / "small",), "it is not removed while this model is served"


def test_what_gives_wrong_answers_beside_a_draft_is_off_and_every_prompt_fits_a_step(store):
    options = plan(store, draft_model="small").options
    assert (options.enable_prefix_caching, options.dynamic_split_fuse) == (False, False)
    assert options.max_num_batched_tokens == 4096
    without = plan(store).options
    assert (without.enable_prefix_caching, without.dynamic_split_fuse) == (True, True)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"draft_model": "no-such-model"}, "no-such-model is not installed .* npu-node pull no-such-model"),
        ({"draft_model": "/no/such/directory"}, "/no/such/directory"),
        ({"draft_model": "large"}, "large is the model itself"),
        ({"draft_model": "small", "prompt_lookup": True}, "draft_model and prompt_lookup"),
        ({"draft_model": "small", "enable_prefix_caching": True}, "enable_prefix_caching = true cannot be used"),
        ({"draft_model": "small", "dynamic_split_fuse": True}, "dynamic_split_fuse = true cannot be used"),
        ({"draft_model": "hearer"}, "hearer is a model for transcription"),
    ],
)
def test_a_draft_that_cannot_be_used_is_refused_by_name(store, wanted, reason):
    install(store, "hearer", "transcription")
    with pytest.raises(ConfigurationError, match=reason):
        plan(store, **wanted)


def test_a_model_for_the_npu_alone_is_refused_with_a_draft(store):
    with pytest.raises(ConfigurationError, match="generates past the end of an answer"):
        plan(store, Device.NPU, [Device.NPU], draft_model="small", placements=["NPU"])


def test_beside_another_device_the_npu_does_without_the_draft_and_says_why(store):
    both = (Device.NPU, Device.CPU)
    on_npu = plan(store, Device.NPU, both, draft_model="small", placements=["NPU", "CPU"])
    (note,) = GENERATE.notes(ModelStore(store).get("large"), on_npu)
    assert "no effect on the NPU" in note
    assert plan(store, Device.CPU, both, draft_model="small", placements=["NPU", "CPU"]).options.draft_model


def test_the_memory_of_both_models_is_asked_for(store):
    large = ModelStore(store).get("large")
    cache = 2 * 2 * 64 * 2 * 2048  # keys and values, layers, values a token, bytes, tokens
    without = plan(store, enable_prefix_caching=False)
    with_draft = plan(store, draft_model="small")
    assert estimate_bytes(large, with_draft) - estimate_bytes(large, without) == 2 * 30_000 + cache
    fixed = plan(store, draft_model="small", cache_size_gb=1)
    assert estimate_bytes(large, fixed) - estimate_bytes(large, without) == 2 * 30_000 + 2**30 - cache


# The KV cache.


SMOLLM = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}


def write(directory, **changes):
    (directory / "config.json").write_text(json.dumps(SMOLLM | changes))
    return directory


def test_keys_and_values_of_every_layer_in_two_bytes(tmp_path):
    assert kv_cache_bytes(write(tmp_path), 1152) == 2 * 30 * 3 * 64 * 2 * 1152
    assert kv_cache_bytes(write(tmp_path, num_key_value_heads=None), 1) == 2 * 30 * 9 * 64 * 2
    assert kv_cache_bytes(write(tmp_path, head_dim=128), 1) == 2 * 30 * 3 * 128 * 2


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"num_attention_heads": 0, "hidden_size": 1}'])
def test_what_is_not_told_is_not_guessed(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert kv_cache_bytes(tmp_path, 1) is None
    assert kv_cache_bytes(tmp_path / "missing", 1) is None
