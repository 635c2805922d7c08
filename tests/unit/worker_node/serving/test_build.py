"""What a model is built with before any engine runs: its files, its compile cache, its memory."""

import json
import logging
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.passports import certify
from worker_node.cli.main import build_parser
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.devices import compile_cache
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.directory import MODEL_FILE, WEIGHTS_FILE, InstalledModel, runtime_problem
from worker_node.models.store import ModelStore
from worker_node.serving import build
from worker_node.serving.build import Machine, build_model, identity_of, installed_model
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.generate import building

SMOLLM = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
DRIVER = {"NPU_DRIVER_VERSION": "1.32", "NPU_COMPILER_VERSION": "7"}
COUNTER = Path("/sys/npu_busy_time_us")


class Built:
    """A directory with a model, and the node that serves it."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "model"
        self.path.mkdir()
        self.root = tmp_path / "compiled"
        for name in (MODEL_FILE, WEIGHTS_FILE):
            (self.path / name).write_bytes(b"1")
        (self.path / "config.json").write_text(json.dumps(SMOLLM))
        self.installed = InstalledModel("m", ModelKind.GENERATION, self.path, 8192, "int4_sym", "smollm")
        devices = (DeviceInfo("NPU", DRIVER), DeviceInfo("CPU"))
        npu = NpuSource(emulated=False, busy_counter=COUNTER, stand_in=False)
        self.machine = Machine(NodeSettings(compile_cache=self.root, engine_nice=5), Probe(devices, "2026.4"), npu)

    def placements(self, **wanted):
        return build_model(self.installed, ModelSettings(name="m", **wanted), self.machine).placements

    def cache(self, **wanted):
        return Path(self.placements(**wanted)[0].engine.spec.options["cache_dir"])


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "ChatTokenizer", lambda *_: None)
    return Built(tmp_path)


def test_the_npus_engine_keeps_what_it_compiles_and_the_cpus_has_nothing_to_keep(built):
    on_npu, on_cpu = built.placements()
    assert (on_npu.device, on_cpu.device) == (Device.NPU, Device.CPU)
    cache = Path(on_npu.engine.spec.options["cache_dir"])
    assert cache.is_dir()
    assert cache.parent == built.root / "m"
    assert json.loads((cache / compile_cache.KEY_FILE).read_bytes())["compiler"] == DRIVER["NPU_COMPILER_VERSION"]


def test_a_new_driver_with_the_same_compiler_keeps_what_was_compiled(built):
    def cache(**versions):
        devices = (DeviceInfo("NPU", DRIVER | versions),)
        built.machine = replace(built.machine, probe=Probe(devices, "2026.4"))
        return built.cache()

    first = cache(NPU_COMPILER_VERSION="8")
    assert cache(NPU_COMPILER_VERSION="8", NPU_DRIVER_VERSION="9.9") == first
    assert cache(NPU_COMPILER_VERSION="9") != first
    assert not first.exists()


def test_the_load_of_a_compile_for_the_npu_is_cold_until_something_compiled_is_kept(built):
    on_npu, on_cpu = built.placements()
    assert (on_npu.cold, on_cpu.cold) == (True, False)
    assert (on_npu.ready_in(), on_cpu.ready_in()) == (math.inf, pytest.approx(3, abs=0.1))
    (built.cache() / "1.blob").touch()
    assert not built.placements()[0].cold
    on_npu, _ = built.placements(blobs="/blobs", max_prompt_len=64)
    assert not on_npu.cold
    assert on_cpu.engine.spec.options["cache_dir"] is None
    assert {on_npu.engine.spec.nice, on_cpu.engine.spec.nice} == {5}


@pytest.mark.parametrize("how", ["graph", "size", "time"])
def test_another_graph_and_other_weights_are_another_model_where_no_manifest_names_them(built, how):
    stale = built.cache()
    assert built.cache() == stale
    weights = built.path / WEIGHTS_FILE
    if how == "graph":
        (built.path / MODEL_FILE).write_bytes(b"2")
    elif how == "size":
        before = weights.stat()
        weights.write_bytes(b"12")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(weights, ns=(1, 1))
    assert built.cache() != stale


def test_a_cache_that_cannot_be_written_leaves_a_note_and_no_cache(built):
    built.root.write_text("a file")
    placement = built.placements()[0]
    assert placement.engine.spec.options["cache_dir"] is None
    assert "nothing compiled is kept" in placement.notes[0]


def test_the_memory_of_a_longer_prompt_is_logged_at_start_up(built, caplog):
    caplog.set_level(logging.WARNING, build.__name__)
    on_npu, on_cpu = built.placements(max_prompt_len=2048)
    # Four times keys and values of 30 layers, 3 heads of 64, in two bytes, for 2048 + 128 tokens (191 MiB), and the
    # scores of 30 layers, 9 heads, in four bytes, for 512 tokens of a chunk and 2048 of the window (1080 MiB).
    note = "max_prompt_len 2048 makes static shapes of 2176 tokens: 1271 MiB of memory"
    careful = (
        "prompts of more than 1800 tokens do not go there: no more is known to be right (openvino.genai#3255); "
        "npu-node certify can prove more"
    )
    assert (on_npu.notes, on_cpu.notes) == ((note, careful), ())
    own = [record.getMessage() for record in caplog.records if record.name.startswith("worker_node.")]
    assert own == [f"m on NPU: {note}", f"m on NPU: {careful}"]


def test_the_command_that_is_named_pulls_the_model_into_the_store_of_the_node(tmp_path):
    store = tmp_path / "a store"
    settings = NodeSettings(model_store=store)
    with pytest.raises(ConfigurationError) as raised:
        installed_model(ModelSettings(name="all-minilm-l6-v2"), ModelStore(store), settings)
    program, *arguments = shlex.split(re.search(r"run: (.*)", raised.value.message)[1])
    assert program == "npu-node"
    assert vars(build_parser().parse_args(arguments))["model_store"] == store


def test_an_npu_that_a_model_is_known_to_break_is_left_out_unless_the_settings_allow_it(built):
    (built.path / "config.json").write_text(json.dumps(SMOLLM | {"model_type": "qwen3_5"}))
    assert [place.device for place in built.placements()] == [Device.CPU]
    assert [place.device for place in built.placements(allow_known_bad=True)] == [Device.NPU, Device.CPU]
    with pytest.raises(ConfigurationError, match="hangs until the device is lost"):
        built.placements(placements=["NPU"])


def test_weights_that_an_npu_computes_slowly_are_noted_and_served(built):
    noted = '<rt_info><nncf><weight_compression><group_size value="64" /></weight_compression></nncf></rt_info>'
    (built.path / MODEL_FILE).write_text(noted)
    on_npu, on_cpu = built.placements()
    assert (len(on_npu.notes), on_cpu.notes) == (1, ())
    assert "in groups of 64" in on_npu.notes[0]


@pytest.mark.parametrize(
    ("graph", "note"),
    [(MODEL_FILE, "Runtime_version"), ("openvino_tokenizer.xml", 'info name="OpenVINO Runtime"')],
)
def test_a_model_that_a_newer_openvino_wrote_is_refused_with_both_versions(built, graph, note):
    def wrote(version):
        (built.path / graph).write_text(f'<net><rt_info><{note} value="{version}" /></rt_info></net>')

    wrote("2026.5.0-23001-abcdef-releases/2026/5")
    with pytest.raises(ConfigurationError) as raised:
        built.placements()
    assert f"{built.path / graph} was written by OpenVINO 2026.5.0, and this node runs 2026.4" in raised.value.message
    assert built.placements(allow_known_bad=True)
    for version in ("2026.4.0.dev20260801", "TestVersion"):
        wrote(version)
        assert built.placements()


NUMBERS = st.integers(min_value=0, max_value=2100)
VERSIONS = st.tuples(NUMBERS, NUMBERS, NUMBERS)


@given(wrote=VERSIONS, runs=VERSIONS, build=st.sampled_from(["", "-22219-abc", "-23001-f1e2-releases/2026/5"]))
def test_a_graph_is_newer_by_year_and_number_alone(tmp_path_factory, wrote, runs, build):
    directory = tmp_path_factory.getbasetemp() / "graphs"
    directory.mkdir(exist_ok=True)
    note = ".".join(map(str, wrote)) + build
    (directory / MODEL_FILE).write_text(f'<rt_info><Runtime_version value="{note}" /></rt_info>')
    problem = runtime_problem(directory, ".".join(map(str, runs)) + build)
    assert (problem is not None) == (wrote[:2] > runs[:2])


def test_admission_expects_the_rates_that_a_passport_has_measured(built, tmp_path):
    settings = NodeSettings(compile_cache=built.root, passports=tmp_path / "passports")
    built.machine = replace(built.machine, settings=settings)
    certify(built.machine, built.installed, rates={"prompt_tokens_per_s": 200.0, "tokens_per_s": 10.0})
    on_npu, on_cpu = built.placements()
    assert on_npu.admission.prefill_rate.seconds(1000) == pytest.approx(5)
    assert on_npu.admission.decode_rate.seconds(10) == pytest.approx(1)
    assert on_cpu.admission.prefill_rate.seconds(1000) is None


@pytest.mark.parametrize(
    ("token_limit", "passport", "limit"),
    [
        (None, None, 1800),
        (None, {"limits": {"max_prompt_tokens": 4096}}, 4096),
        (None, {"verdict": "limited", "limits": {"max_prompt_tokens": 2900}}, 2900),
        (None, {"limits": {"max_prompt_tokens": 4096}, "other": {"driver": "1.30"}}, 1800),
        (1000, {"limits": {"max_prompt_tokens": 4096}}, 1000),
        (3000, {"verdict": "limited", "limits": {"max_prompt_tokens": 2900}}, 2900),
        (3000, None, 3000),
    ],
    ids=["nothing is known", "proven", "proven in part", "expired", "set below", "set above", "set"],
)
def test_prompts_are_as_long_as_is_proven_or_set(built, tmp_path, token_limit, passport, limit):
    settings = NodeSettings(
        compile_cache=built.root, passports=tmp_path / "passports", npu_token_limit=token_limit, memory_budget=2**34
    )
    built.machine = replace(built.machine, settings=settings)
    if passport is not None:
        certify(built.machine, built.installed, ModelSettings(name="m", max_prompt_len=4096), **passport)
    on_npu, on_cpu = built.placements(max_prompt_len=4096)
    assert (on_npu.prompt_limit, on_cpu.prompt_limit) == (limit, 8192)
    assert any(f"more than {limit} tokens" in note for note in on_npu.notes) == (limit < 4096)


def test_a_passport_holds_whatever_is_computed_ahead(built, tmp_path):
    settings = NodeSettings(compile_cache=built.root, passports=tmp_path / "passports")
    built.machine = replace(built.machine, settings=settings)
    identity = identity_of(built.installed, ModelSettings(name="m"), Device.NPU, built.machine.probe, settings)
    ahead = ModelSettings(name="m", prewarm=["You are an agent."])
    assert identity_of(built.installed, ahead, Device.NPU, built.machine.probe, settings) == identity


def test_a_passport_holds_for_the_properties_with_which_the_device_was_examined(built):
    def examined_with(on_npu, on_cpu):
        placements = [{"device": "NPU", "plugin_config": on_npu}, {"device": "CPU", "plugin_config": on_cpu}]
        wanted = ModelSettings(name="m", placements=placements)
        return identity_of(built.installed, wanted, Device.NPU, built.machine.probe, built.machine.settings)

    turbo, plain = {"NPU_TURBO": True}, {}
    assert examined_with(turbo, plain) != examined_with(plain, plain)
    assert examined_with(plain, {"INFERENCE_NUM_THREADS": 2}) == examined_with(plain, plain)


def test_faults_strike_real_devices_only_where_they_are_allowed(built, tmp_path):
    (tmp_path / "faults.toml").write_text("[[fault]]\nkind = 'crash'\n")
    for allowed in (False, True):
        settings = NodeSettings(
            compile_cache=built.root, npu_emulation=True, allow_faults=allowed, faults=tmp_path / "faults.toml"
        )
        npu = NpuSource(emulated=True, busy_counter=COUNTER, stand_in=True)
        built.machine = Machine(settings, built.machine.probe, npu)
        on_npu, on_cpu = built.placements()
        assert (on_npu.faults, on_cpu.faults) == (("crash",), ("crash",) if allowed else ())
