"""How generation models are planned: the memory of their KV cache, and options that are ignored."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.directory import Manifest, write_manifest
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, plan_engine
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.tasks.generate.building import GENERATE, GenerationModel, kv_cache_bytes, prewarm_text

NPU = NpuSource(emulated=True, busy_counter=Path("/proc/1/fd/3"), stand_in=True)
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    directory = root / "large"
    directory.mkdir()
    (directory / "openvino_model.xml").write_text("graph")
    (directory / "openvino_model.bin").write_bytes(bytes(100_000))
    (directory / "config.json").write_text(json.dumps(SHAPE))
    manifest = Manifest(
        version=1,
        id="large",
        kind=ModelKind.GENERATION,
        family="f",
        context_limit=4096,
        quantization="int4_sym",
        licence="?",
        source="?",
        source_sha256={},
        files={"openvino_model.bin": 100_000},
        made_with={},
    )
    write_manifest(directory, manifest)
    return root


def plan(store, device=Device.CPU, budget=2**34, npu=NPU, architecture="4000", plugin_config=None, **wanted):
    found = Probe((DeviceInfo("NPU", {"DEVICE_ARCHITECTURE": architecture}),), "test")
    machine = Machine(NodeSettings(model_store=store, memory_budget=budget), found, npu)
    place = PlacementSettings(device=device, plugin_config=plugin_config or {})
    target = machine.target(ModelStore(store).get("large"), ModelSettings(name="large", **wanted), device)
    return plan_engine(GENERATE, target, place, machine)


def test_a_cache_of_a_fixed_size_is_asked_for_and_otherwise_what_ordinary_requests_take(store):
    cache = 2 * 2 * 64 * 2 * 2048  # keys and values, layers, values a token, bytes, tokens
    grows, fixed = plan(store, enable_prefix_caching=False), plan(store, cache_size_gb=1)
    assert fixed.memory - grows.memory == 2**30 - cache
    wider = plan(store, enable_prefix_caching=False, plugin_config={"KV_CACHE_PRECISION": "f32"})
    assert wider.memory - grows.memory == cache


# The prefix cache of the NPU.

TOKEN = 2 * 2 * 64 * 2  # keys and values, layers, values a token, bytes
REAL = NpuSource(emulated=False, busy_counter=Path("/sys/npu_busy_time_us"), stand_in=False)


@pytest.mark.parametrize(
    ("npu", "wanted", "chunk"),
    [
        (NPU, {}, 256),
        (REAL, {}, 256),
        (REAL, {"max_prompt_len": 4096}, 1024),
        (NPU, {"max_prompt_len": 4096}, 256),
        (NPU, {"max_prompt_len": 100}, 64),
        (REAL, {"prefill_chunk_size": 512}, 512),
        (REAL, {"enable_prefix_caching": False}, None),
        (NPU, {"max_prompt_len": 128, "enable_prefix_caching": False}, 128),
    ],
)
def test_a_window_has_several_chunks_where_prompts_are_kept(store, npu, wanted, chunk):
    options = plan(store, Device.NPU, npu=npu, **wanted).options
    caches = wanted.get("enable_prefix_caching", True)
    assert options.prefill_chunk_size == chunk
    assert options.properties()["NPUW_LLM_PREFIX_CACHING_BLOCK_SIZE"] == (chunk if caches else None)
    assert options.properties()["NPUW_LLM_ENABLE_PREFIX_CACHING"] == ("YES" if caches else None)


@given(budget=st.integers(1, 2**36), size=st.sampled_from([16, 64, 256, 512]))
def test_the_prefix_cache_takes_a_16th_of_the_memory_at_most(store, budget, size):
    found = plan(store, Device.NPU, budget, prefill_chunk_size=size)
    blocks = found.options.prefix_cache_max_num_blocks
    assert blocks == 1 or size * blocks * TOKEN <= budget / 16
    assert size * blocks <= 16_384
    assert size * (2 * blocks) > 16_384 or size * (2 * blocks) * TOKEN > budget / 16, "it could have held twice as much"
    assert blocks.bit_count() == 1, "little changes of the budget change nothing that is compiled"


def test_the_memory_of_the_window_and_of_what_is_kept_is_in_the_estimate(store):
    def memory(**wanted):
        return plan(store, Device.NPU, **wanted).memory

    plain = memory(enable_prefix_caching=False)
    assert memory(prefix_cache_max_num_blocks=32) - plain == 32 * 256 * TOKEN
    # Four copies of the window's keys and values, and without pyramid attention the scores of a chunk in each layer.
    longer = memory(enable_prefix_caching=False, max_prompt_len=2048) - plain
    assert longer == 1024 * (4 * TOKEN + 4 * 2 * 4 * 256)
    pyramid = {"prefill_attention_hint": "PYRAMID", "enable_prefix_caching": False}
    assert memory(max_prompt_len=3000, **pyramid) - memory(max_prompt_len=2048, **pyramid) == 952 * 4 * TOKEN
    assert plan(store, Device.NPU, max_prompt_len=3000).options.prefill_attention_hint == "PYRAMID"
    assert plan(store, Device.NPU, max_prompt_len=2048).options.prefill_attention_hint is None


def test_an_npu_whose_compiler_refuses_several_chunks_gets_one_unless_the_settings_ask(store):
    found = plan(store, Device.NPU, npu=REAL, architecture="3720")
    assert (found.options.prefill_chunk_size, found.options.enable_prefix_caching) == (None, False)
    assert any("refuses prompts in several chunks for NPU 3720" in note for note in found.notes)
    assert found.options.prefill_hint is None
    assert plan(store, Device.NPU, npu=REAL, architecture="3720", max_prompt_len=2048).options.prefill_hint == "STATIC"
    asked = plan(store, Device.NPU, npu=REAL, architecture="3720", enable_prefix_caching=True)
    assert (asked.options.prefill_chunk_size, asked.notes) == (256, ())
    assert plan(store, Device.NPU, npu=NPU, architecture="3720").options.prefill_chunk_size == 256


def test_without_chunks_there_is_no_prefix_cache_and_whoever_asks_for_it_is_told(store):
    found = plan(store, Device.NPU, prefill_hint="STATIC", enable_prefix_caching=True)
    assert not found.options.enable_prefix_caching
    assert any("there is no prefix cache" in note for note in found.notes)
    assert plan(store, Device.NPU, prefill_hint="STATIC").notes == ()
    one_chunk = plan(store, Device.NPU, prefill_chunk_size=2048)
    assert one_chunk.notes == ("there is no prefix cache: prompts of at most 1024 tokens are computed in one chunk",)


def test_blocks_are_whole_chunks_whatever_is_asked_for(store):
    asked = {"NPUW_LLM_PREFIX_CACHING_BLOCK_SIZE": 64, "NPUW_DQ": "NO"}
    found = plan(store, Device.NPU, plugin_config=asked)
    assert found.options.plugin_config == {"NPUW_DQ": "NO"}
    assert found.notes == ("NPUW_LLM_PREFIX_CACHING_BLOCK_SIZE is ignored: blocks are whole chunks, of 256 tokens",)


# What is computed ahead.


def test_prewarm_takes_texts_and_files(tmp_path):
    wanted = ModelSettings(name="large")
    file = tmp_path / "a file.txt"
    file.write_bytes(b"You are an agent.\n")
    assert prewarm_text(str(file), wanted) == "You are an agent.\n"
    assert prewarm_text("You are an agent.", wanted) == "You are an agent."


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("/nowhere/agent.txt", "names /nowhere/agent.txt, which cannot be read: No such file"),
        pytest.param("{}", "which cannot be read: Is a directory", marks=pytest.mark.linux),
        ("{}/binary", "which cannot be read: 'utf-8' codec"),
        ("{}/large", "which cannot be read: it has more than 1000000 bytes"),
        ("agent.txt", "must be texts, or paths that begin with /, ./ or ~/; got 'agent.txt'"),
        ("", "must be texts, or paths that begin with /, ./ or ~/; got an empty text"),
    ],
)
def test_what_prewarm_cannot_read_is_an_error_of_the_settings(tmp_path, value, problem):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"a" * 1_000_001)
    with pytest.raises(ConfigurationError, match=re.escape(problem)) as raised:
        prewarm_text(value.replace("{}", str(tmp_path)), ModelSettings(name="large"))
    assert raised.value.message.startswith("model large: prewarm")


class WordTokenizer:
    chat_template = ""

    def encode_prompt(self, text):
        return list(range(len(text.split())))


@pytest.mark.parametrize(
    ("words", "options", "problem"),
    [
        (100, {}, "it has 100 tokens, and this engine keeps prompts of 256 to 1023"),
        (1024, {}, "it has 1024 tokens, and this engine keeps prompts of 256 to 1023"),
        (300, {"enable_prefix_caching": False}, "this engine has no prefix cache"),
    ],
)
def test_a_prewarmed_prompt_that_the_cache_cannot_keep_is_noted_without_its_text(store, words, options, problem):
    model = GenerationModel(ModelStore(store).get("large"), WordTokenizer())
    wanted = ModelSettings(name="large", prewarm=["fits " * 300, "secret " * words], **options)
    prewarm, notes = GENERATE.prewarm(model, wanted, plan(store, Device.NPU, **options))
    assert notes[-1] == f"prewarm[1] is ignored: {problem}"
    assert (prewarm is None, len(notes)) == ((True, 2) if options else (False, 1))


# The KV cache.


SMOLLM = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}


def write(directory, **changes):
    (directory / "config.json").write_text(json.dumps(SMOLLM | changes))
    return directory


@pytest.mark.parametrize(
    ("precision", "value"), [(None, 2), ("f16", 2), ("bf16", 2), ("f32", 4), ("u8", 1), ("u4", 0.5)]
)
def test_keys_and_values_take_the_bytes_of_their_precision(tmp_path, precision, value):
    assert kv_cache_bytes(write(tmp_path), 1152, precision) == 2 * 30 * 3 * 64 * value * 1152


def test_keys_and_values_of_every_layer_and_head(tmp_path):
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
