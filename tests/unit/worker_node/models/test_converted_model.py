"""A model that was made of a GGUF file: what a node needs is there, and it runs on the CPU and on the NPU path."""

import openvino_genai
import pytest

from tests.support.published import install
from worker_node.core.errors import ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.directory import MANIFEST_FILE, read_directory
from worker_node.models.store import ModelStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store for the tests that only read the converted model."""
    return ModelStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def converted(store, make_gguf):
    """A tiny model in the store, in int8, which random weights bear."""
    return install(store, make_gguf(), "tiny", quantization=Quantization.INT8_SYM)


def test_a_converted_model_brings_all_that_a_node_needs(converted):
    assert (converted.id, converted.kind, converted.family) == ("tiny", ModelKind.GENERATION, "chatml")
    assert (converted.context_limit, converted.quantization) == (128, "int8_sym")
    assert converted.canary is None
    assert "tiny.gguf" in converted.source_sha256
    assert "<|im_start|>" in (converted.path / "chat_template.jinja").read_text()


def test_it_runs_with_its_chat_template_and_its_end_token(converted):
    tokenizer = openvino_genai.Tokenizer(converted.path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode("hello, world").input_ids.data[0].tolist()) == "hello, world"
    config = openvino_genai.LLMPipeline(converted.path, "CPU").get_generation_config()
    assert config.eos_token_id == 2
    assert 2 in config.stop_token_ids


def test_a_converted_model_can_be_taken_over_without_its_manifest(in_process, store, converted, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in converted.path.iterdir():
        if path.name != MANIFEST_FILE:
            (plain / path.name).write_bytes(path.read_bytes())
    described = read_directory(plain)
    assert (described.id, described.context_limit, described.quantization) == ("plain", 128, "int8_sym")
    assert (described.family, described.canary) == ("chatml", None)
    adopted = install(store, plain, "adopted", kind=ModelKind.GENERATION)
    assert adopted.quantization == "int8_sym"
    assert (adopted.path / "openvino_model.bin").read_bytes() == (plain / "openvino_model.bin").read_bytes()
    with pytest.raises(ConversionFailed, match="compressed already"):
        install(store, plain, "twice", quantization=Quantization.INT4_SYM)


def test_it_runs_on_the_npu_path(converted):
    pipeline = openvino_genai.LLMPipeline(
        converted.path,
        "NPU",
        NPU_USE_NPUW="YES",
        NPUW_DEVICES="CPU",
        NPUW_ONLINE_PIPELINE="NONE",
        MAX_PROMPT_LEN=64,
        MIN_RESPONSE_LEN=64,
    )
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = 5, True
    on_npu = pipeline.generate(["hello"], config)
    on_cpu = openvino_genai.LLMPipeline(converted.path, "CPU").generate(["hello"], config)
    assert on_npu.perf_metrics.get_num_generated_tokens() == 5
    assert on_npu.texts[0][:1] == on_cpu.texts[0][:1]
