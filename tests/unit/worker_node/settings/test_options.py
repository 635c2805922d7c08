"""Options of engines are declared once; keys, validation and notes follow from that."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Gt

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import Probe
from worker_node.encoders.jobs import DynamicEncoderOptions
from worker_node.engines import options as declaration
from worker_node.engines.options import Option, declare, engine_for
from worker_node.models.directory import InstalledModel
from worker_node.serving.build import Machine, check_options, plan_engine
from worker_node.serving.task import served_task
from worker_node.settings import InvalidSettings, ModelSettings, NodeSettings, PlacementSettings, parse_settings
from worker_node.tasks.generate.task import ContinuousOptions, GenerationOptions, StatefulOptions


def model_of(*lines):
    return parse_settings("\n".join(["[[models]]", 'name = "m"', *lines]), "node.toml").models[0]


def problems(*lines):
    with pytest.raises(InvalidSettings) as caught:
        model_of(*lines)
    return [str(problem) for problem in caught.value.problems]


def test_options_are_keys_of_the_models_table_and_have_their_declared_defaults():
    wanted = model_of("max_num_seqs = 8", "best_of_limit = 2", "min_response_len = 64")
    assert (wanted.of(ContinuousOptions).max_num_seqs, wanted.of(ContinuousOptions).max_num_batched_tokens) == (8, 256)
    assert (wanted.of(GenerationOptions).best_of_limit, wanted.of(GenerationOptions).max_tokens_limit) == (2, None)
    assert wanted.of(StatefulOptions) == StatefulOptions(min_response_len=64)


def test_the_names_of_other_servers_with_the_same_meaning_are_taken():
    assert model_of("cache_size = 4").of(ContinuousOptions).cache_size_gb == 4
    assert problems("cache_size = -1") == [
        "node.toml: models[0].cache_size: Input should be greater than or equal to 0"
    ]
    assert problems("cache_size = 4", "cache_size_gb = 4") == [
        "node.toml: models[0].cache_size_gb: cache_size_gb is given twice, under two names"
    ]


def test_all_problems_of_a_model_are_told_together():
    # Tasks declare options in the order of their import.
    assert sorted(problems("npu_buckets = [16, 4]", "idle_unload_s = 0", "strems = 2", "prefill_hint = 1")) == [
        "node.toml: models[0].idle_unload_s: Input should be greater than 0",
        "node.toml: models[0].npu_buckets[1]: Input should be greater than or equal to 8",
        "node.toml: models[0].prefill_hint: Input should be 'DYNAMIC' or 'STATIC'",
        "node.toml: models[0].strems: unknown key; did you mean streams?",
    ]
    (problem,) = problems("options = { streams = 2 }")
    assert problem.startswith("node.toml: models[0].options: unknown key")


NATIVE = """{ MAX_PROMPT_LEN = 2048, MIN_RESPONSE_LEN = 256, PREFILL_HINT = "STATIC", GENERATE_HINT = "BEST_PERF",
  NPUW_LLM_PREFILL_CHUNK_SIZE = 512, CACHE_DIR = "/cache", NPUW_LLM_ENABLE_PREFIX_CACHING = "NO",
  NPUW_LLM_PREFIX_CACHING_MAX_NUM_BLOCKS = 32,
  NPUW_LLM_PREFILL_ATTENTION_HINT = "PYRAMID", NPUW_LLM_GENERATE_ATTENTION_HINT = "STATIC",
  NPUW_DQ = "NO" }"""


@pytest.mark.parametrize(
    "lines",
    [
        [f'placements = [{{ device = "NPU", plugin_config = {NATIVE} }}, "CPU"]'],
        ['placements = ["NPU"]', f"plugin_config = {NATIVE}"],  # as OpenVINO Model Server has it
        ["max_prompt_len = 2048", f'placements = [{{ device = "NPU", plugin_config = {NATIVE} }}]'],
    ],
)
def test_properties_of_the_npu_that_are_settings_here_are_taken_as_these(lines):
    wanted = model_of(*(line.replace("\n ", "") for line in lines))
    assert wanted.of(StatefulOptions) == StatefulOptions(
        max_prompt_len=2048,
        min_response_len=256,
        prefill_hint="STATIC",
        generate_hint="BEST_PERF",
        prefill_chunk_size=512,
        prefill_attention_hint="PYRAMID",
        generate_attention_hint="STATIC",
        enable_prefix_caching=False,
        prefix_cache_max_num_blocks=32,
    )
    assert wanted.compile_cache == Path("/cache")
    assert wanted.placements[0].plugin_config == {"NPUW_DQ": "NO"}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            ["max_prompt_len = 64", 'placements = [{ device = "NPU", plugin_config = { MAX_PROMPT_LEN = 2048 } }]'],
            "models[0].placements[0].plugin_config.MAX_PROMPT_LEN: is 2048 and max_prompt_len of the model is 64; both "
            "mean the same: remove one",
        ),
        (
            ['placements = [{ device = "NPU", plugin_config = { MAX_PROMPT_LEN = 0 } }]'],
            "models[0].max_prompt_len: Input should be greater than 0",
        ),
        (
            ['placements = ["NPU", "CPU"]', "plugin_config = { MAX_PROMPT_LEN = 64 }"],
            "models[0].plugin_config: unknown key; docs/settings.md has them all",
        ),
    ],
)
def test_properties_that_cannot_be_taken_are_named_with_the_setting_of_the_same_meaning(lines, problem):
    assert problems(*lines) == [f"node.toml: {problem}"]


def test_an_option_for_another_kind_of_model_is_reported_with_its_path():
    embedding = InstalledModel("m", ModelKind.EMBEDDING, Path("/m"), 256, "f32", "bert")
    with pytest.raises(ConfigurationError) as caught:
        check_options(embedding, model_of("streams = 1", "max_num_seqs = 2"))
    assert caught.value.message == (
        "node.toml: models[0].max_num_seqs: model m: max_num_seqs cannot be used by an engine for embedding; remove it"
    )
    with pytest.raises(ConfigurationError) as caught:
        check_options(embedding, ModelSettings(name="m", max_num_seqs=2))
    assert caught.value.message.startswith("model m: max_num_seqs cannot")
    with pytest.raises(ConfigurationError, match=r"max_batch_row cannot be used .*; did you mean max_batch_rows\?"):
        check_options(embedding, ModelSettings(name="m").model_copy(update={"options": {"max_batch_row": 2}}))


@pytest.fixture
def toy(monkeypatch):
    declaration.declarations()  # imports those of the tasks: never into the dictionary of this test
    monkeypatch.setattr(declaration, "_DECLARED", {})

    @declare
    @dataclass(frozen=True, kw_only=True)
    class ToyOptions(DynamicEncoderOptions):
        title: ClassVar[str] = "Toy"
        task: ClassVar[ModelKind] = ModelKind.EMBEDDING
        devices: ClassVar[frozenset[Device]] = frozenset({Device.GPU})
        runner: ClassVar[str] = "toy.package:Runner"

        engine: Literal["toy"] = "toy"
        wheels: Annotated[int, Gt(0), Option("how many it rolls on", also=("tyres",))] = 4

    return ToyOptions


def test_a_package_adds_an_engine_by_its_declaration_alone(toy):
    assert engine_for(ModelKind.EMBEDDING, Device.GPU) is toy
    wanted = model_of("tyres = 3")
    assert wanted.of(toy).wheels == 3
    assert problems("whels = 3") == ["node.toml: models[0].whels: unknown key; did you mean wheels?"]
    assert problems("wheels = 0") == ["node.toml: models[0].wheels: Input should be greater than 0"]
    installed = InstalledModel("m", ModelKind.EMBEDDING, Path("/m"), 256, "f32", "bert")
    npu = NpuSource(emulated=False, busy_counter=Path("/npu"), stand_in=False)
    place = PlacementSettings(device=Device.GPU)
    machine = Machine(NodeSettings(), Probe((), "test"), npu)
    target = machine.target(installed, wanted, Device.GPU)
    plan = plan_engine(served_task("embedding"), target, place, machine)
    assert (plan.options.runner, plan.options) == ("toy.package:Runner", toy(wheels=3, context_limit=256))
