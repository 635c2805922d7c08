"""A GGUF file becomes a model with the file's own weights, fit for the NPU path; what is in doubt is refused."""

import numpy as np
import openvino as ov
import pytest
from gguf import GGMLQuantizationType, RopeScalingType
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.models.catalog import Quantization
from worker_node.models.convert import gguf as conversion
from worker_node.models.convert.gguf import GgufFile, import_graph, restore_weights
from worker_node.models.directory import TOKENIZER_FILES

pytestmark = pytest.mark.slow

INT8 = Quantization.INT8_SYM


def import_gguf(path, tmp_path):
    """GenAI's graph of a file, as it imports it, and the file."""
    target, scratch = tmp_path / "target", tmp_path / "scratch"
    target.mkdir()
    scratch.mkdir()
    gguf = GgufFile(path)
    return import_graph(gguf, target, scratch), gguf


@pytest.fixture(scope="module")
def imported_once(make_gguf, tmp_path_factory):
    """The directory of the graph of a tiny Llama as GenAI imports it, and its file."""
    path, directory = make_gguf(), tmp_path_factory.mktemp("imported")
    import_gguf(path, directory)
    return directory, path


@pytest.fixture
def imported(imported_once):
    directory, path = imported_once
    return ov.Core().read_model(directory / "scratch" / "openvino_model.xml"), GgufFile(path)


@pytest.fixture
def in_f16(monkeypatch):
    """Matrices are put back as they are in the file, so that the graph can be compared with the formulas."""

    def matrix(gguf, name, _quantization):
        return op.convert(op.constant(gguf.tensor(name).astype(np.float16), name=name), "f32")

    monkeypatch.setattr(conversion, "stored_matrix", matrix)


def constants(model):
    return {node.friendly_name: node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"}


def test_a_fault_after_the_files_were_written_is_not_taken_for_their_end(monkeypatch, make_gguf, tmp_path):
    class Full:
        def __init__(self, model, *_arguments, **_options):
            for name in ("openvino_model.xml", *TOKENIZER_FILES):
                (model.parent / name).touch()
            raise RuntimeError("Check 'bin_file.good()' failed: NONE of the bytes was written")

    monkeypatch.setattr(conversion.openvino_genai, "LLMPipeline", Full)
    with pytest.raises(ConversionFailed, match=r"cannot import it .*of the bytes"):
        import_gguf(make_gguf(), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "quantization", "count"),
    [("llama", "Q4_0", 20), ("llama", "Q8_0", 20), ("qwen2", "Q4_1", 26), ("qwen3", "Q4_1", 24)],
)
def test_every_tensor_of_the_file_is_in_the_graph_under_its_name(
    make_gguf, tmp_path, architecture, quantization, count
):
    path = make_gguf(architecture=architecture, quantization=GGMLQuantizationType[quantization])
    model, gguf = import_gguf(path, tmp_path)
    assert restore_weights(model, gguf, INT8) == len(gguf.shapes()) == count
    found = constants(model)
    for name, shape in gguf.shapes().items():
        values, expected = np.array(found[name].data), gguf.tensor(name)
        if len(shape) == 1:
            np.testing.assert_array_equal(values.reshape(shape), expected)
        else:
            scale = np.array(found[f"{name}/scale"].data, np.float32)
            assert np.all(np.abs(values * scale - expected) <= 1.1 * np.abs(scale))


def test_the_graph_of_another_file_is_refused(imported, make_gguf):
    model, _ = imported
    with pytest.raises(ConversionFailed, match="matches no tensor"):
        restore_weights(model, GgufFile(make_gguf("other.gguf", seed=1)), INT8)


def test_two_tensors_that_are_alike_are_refused(imported, monkeypatch):
    model, gguf = imported
    tensor = gguf.tensor
    twins = {"blk.1.attn_v.weight": "blk.0.attn_v.weight"}
    monkeypatch.setattr(gguf, "tensor", lambda name, *rows: tensor(twins.get(name, name), *rows))
    with pytest.raises(ConversionFailed, match="could be"):
        restore_weights(model, gguf, INT8)


def test_a_tied_matrix_that_is_stored_twice_is_matched_by_what_reads_it(make_gguf, in_f16, tmp_path):
    path = make_gguf(stored_twice=True)
    model, gguf = import_gguf(path, tmp_path)
    assert restore_weights(model, gguf, INT8) == 21
    found = constants(model)
    for name in ("token_embd.weight", "output.weight"):
        np.testing.assert_array_equal(np.array(found[name].data), gguf.tensor(name).astype(np.float16))
    readers = {name: {reader_type(found[name])} for name in ("token_embd.weight", "output.weight")}
    assert readers == {"token_embd.weight": {"Gather"}, "output.weight": {"MatMul"}}


def reader_type(constant):
    """The operation that reads a constant through its conversion."""
    (convert,) = constant.output(0).get_target_inputs()
    (reader,) = convert.get_node().output(0).get_target_inputs()
    return reader.get_node().get_type_name()


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"junk" * 100])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    (tmp_path / "bad.gguf").write_bytes(damage)
    with pytest.raises(ConversionFailed, match=r"bad\.gguf"):
        GgufFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": GGMLQuantizationType.Q5_0}, "has tensors in Q5_0; OpenVINO GenAI reads .*Q8_0"),
        ({"architecture": "mamba"}, "'mamba'; those that can be converted are llama"),
        ({"extra": {"rope_freqs.weight": (8,)}}, r"scales its rotary frequencies \(rope_freqs.* end in -ov"),
        ({"scaling": RopeScalingType.YARN}, r"scales its rotary embedding \(yarn\)"),
        ({"extra": {"blk.0.attn_q.bias": (64,)}}, r"tensors that no llama model has \(blk\.0\.attn_q\.bias\)"),
        ({"rows": 256}, "has 288 tokens and vectors for 256 of them"),
    ],
)
def test_a_file_that_genai_does_not_read_is_refused_with_what_it_does(make_gguf, options, reason):
    with pytest.raises((ConversionFailed, SourceRejected), match=reason):
        GgufFile(make_gguf(**options))
