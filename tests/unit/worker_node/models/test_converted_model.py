"""A model that was made of a GGUF file has all that a node needs. The embedded chat model, which tests/real runs on the
CPU and on the NPU path, is made in the same way."""

import pytest

from tests.support.published import install
from worker_node.cli.main import main
from worker_node.core.errors import BadRequest, ConversionFailed
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


def test_a_pull_for_a_device_chooses_the_form_and_says_why(in_process, store, make_gguf, capsys):
    source, where = str(make_gguf()), ["--model-store", str(store.root)]
    assert main(["pull", source, "--for", "npu", "--name", "for-npu", *where]) == 0
    said = capsys.readouterr()
    assert "for-npu: ready, int8_sym" in said.out
    assert "storing the weights in int8_sym, the truest form" in said.err
    with pytest.raises(SystemExit):
        main(["pull", source, "--for", "npu", "--quantization", "int8_sym", *where])
    assert "give one of the two" in capsys.readouterr().err
    assert main(["pull", str(store.get("for-npu").path), "--for", "cpu", "--name", "again", *where]) != 0
    assert "--for chooses the form of GGUF files" in capsys.readouterr().err


def test_a_form_for_a_device_stands_beside_the_catalogs_own(store):
    spec = store.pull_spec("smollm2", device="npu")
    assert (spec.model_id, spec.device) == ("smollm2-135m-instruct-npu", "npu")
    with pytest.raises(BadRequest, match="only GGUF models leave a choice"):
        store.pull_spec("all-minilm-l6-v2", device="npu")
