"""How generation models are planned: the memory of their KV cache, and options that are ignored."""

import json
from pathlib import Path

import pytest

from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import Probe
from worker_node.models.directory import Manifest, write_manifest
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, plan_engine
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
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
    return tmp_path


def plan(store, device=Device.CPU, **wanted):
    machine = Machine(NodeSettings(model_store=store), Probe((), "test"), NPU)
    settings = ModelSettings(name="large", **wanted)
    return plan_engine(GENERATE, ModelStore(store).get("large"), settings, PlacementSettings(device=device), machine)


def test_a_cache_of_a_fixed_size_is_asked_for_and_otherwise_what_ordinary_requests_take(store):
    cache = 2 * 2 * 64 * 2 * 2048  # keys and values, layers, values a token, bytes, tokens
    grows, fixed = plan(store, enable_prefix_caching=False), plan(store, cache_size_gb=1)
    assert fixed.memory - grows.memory == 2**30 - cache


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


@pytest.mark.parametrize(
    ("device", "options", "able"),
    [
        (Device.CPU, {"enable_prefix_caching": False}, True),
        (Device.CPU, {}, False),
        (Device.CPU, {"enable_prefix_caching": False, "prompt_lookup": True}, False),
        (Device.NPU, {}, False),
    ],
)
def test_beams_are_searched_where_they_leave_nothing_wrong_in_the_prefix_cache(store, device, options, able):
    assert ("beam_search" not in plan(store, device, **options).lacks) is able
