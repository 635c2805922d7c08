"""A GGUF file becomes a model with the file's own weights, fit for the NPU path; what would be wrong is refused."""

import math
import re

import numpy as np
import openvino as ov
import openvino_genai
import pytest
from gguf import GGMLQuantizationType, RopeScalingType
from openvino import opset13 as op

from tests.unit.worker_node.models import numpy_decoder
from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.models.catalog import Quantization
from worker_node.models.convert import gguf as conversion
from worker_node.models.convert.gguf import ARCHITECTURES, GgufFile, import_graph, store_weights, write_tokenizer
from worker_node.models.directory import MODEL_FILE, content_hash, noted_compression

pytestmark = pytest.mark.slow

INT8 = Quantization.INT8_SYM
IDS = np.random.default_rng(0).integers(3, 250, 12)


@pytest.fixture
def exact(monkeypatch):
    """Matrices are stored as they are in the file, so that the graph can be compared with the formulas."""
    monkeypatch.setattr(conversion, "stored_matrix", lambda gguf, name, _: op.constant(gguf.tensor(name), name=name))


def converted(path):
    model = import_graph(path)
    store_weights(model, GgufFile(path), INT8)
    return model


def compiled(model):
    exactly = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return ov.Core().compile_model(model, "CPU", exactly).create_infer_request()


def step(request, ids, past=0, padding=0):
    """The logits of one more part of a text that begins after this many tokens of padding."""
    total = past + ids.shape[1]
    mask = np.arange(total)[None] >= np.atleast_1d(padding)[:, None]
    positions = np.clip(np.arange(total)[None] - np.atleast_1d(padding)[:, None], 0, None)[:, past:]
    inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "position_ids": positions}
    return request.infer(inputs | {"beam_idx": np.arange(len(ids), dtype=np.int32)})["logits"].copy()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("architecture", "stored_twice"), [*((name, False) for name in ARCHITECTURES), ("llama", True)]
)
def test_each_architecture_computes_what_llama_cpp_does(make_gguf, architecture, stored_twice):
    """Its rotary embedding is one operation on a CPU: two in each layer. A tied matrix that is stored twice is looked
    up in one and multiplied by the other."""
    path = make_gguf(architecture=architecture, stored_twice=stored_twice)
    request, expected = compiled(converted(path)), numpy_decoder.logits(path, IDS)
    found = np.concatenate([step(request, IDS[None, :7]), step(request, IDS[None, 7:], past=7)], axis=1)
    np.testing.assert_allclose(found[0], expected, atol=1e-3)
    nodes = request.get_compiled_model().get_runtime_model().get_ops()
    assert [node.get_rt_info()["layerType"].astype(str) for node in nodes].count("RoPE") == 4


@pytest.mark.usefixtures("exact")
def test_a_shorter_text_of_a_batch_is_not_changed_by_its_padding(make_gguf):
    path = make_gguf()
    short = np.concatenate([[0, 0, 0], IDS[:9]])
    found = step(compiled(converted(path)), np.stack([IDS, short]), padding=[0, 3])
    np.testing.assert_allclose(found[0], numpy_decoder.logits(path, IDS), atol=1e-3)
    np.testing.assert_allclose(found[1, 3:], numpy_decoder.logits(path, IDS[:9]), atol=1e-3)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_tensor_of_the_file_is_in_the_graph_under_its_name(make_gguf, monkeypatch, quantization):
    # Some rows at a time, as of the matrices of large models.
    monkeypatch.setattr(conversion, "_WEIGHTS_AT_ONCE", 1000)
    path = make_gguf(quantization=GGMLQuantizationType[quantization])
    model, gguf = converted(path), GgufFile(path)
    found = {node.friendly_name: node for node in model.get_ops() if node.get_type_name() == "Constant"}
    for name, shape in gguf.shapes().items():
        values, expected = np.array(found[name].data), gguf.tensor(name)
        if len(shape) == 1:
            np.testing.assert_array_equal(values, expected)
        else:
            scale = np.array(found[f"{name}/scale"].data, np.float32)
            assert np.all(np.abs(values * scale - expected) <= 1.1 * np.abs(scale))


@pytest.mark.parametrize("quantization", ["Q4_K", "Q5_K", "Q6_K"])
def test_the_front_end_reads_the_quantizations_that_are_said_to_be_readable(make_gguf, quantization):
    import_graph(make_gguf(quantization=GGMLQuantizationType[quantization], hidden=256))


def test_a_graph_without_a_tensor_of_the_file_is_refused(make_gguf):
    path, other = make_gguf(), make_gguf(architecture="qwen3")
    with pytest.raises(ConversionFailed, match=r"differ in the tensors blk\.0\.attn_k_norm\.weight, "):
        store_weights(import_graph(path), GgufFile(other), INT8)


@pytest.mark.parametrize(
    ("form", "noted"), [("INT8_SYM", "-1"), ("INT4_SYM", "64"), ("INT4_INT8", "64"), ("INT4_INT8_CW", "-1")]
)
def test_the_form_of_the_weights_is_noted_where_openvino_and_the_node_look_for_it(make_gguf, tmp_path, form, noted):
    path, saved = make_gguf(), tmp_path / MODEL_FILE
    model = import_graph(path)
    store_weights(model, GgufFile(path), Quantization[form])
    ov.save_model(model, saved)
    assert noted_compression(saved) == {"mode": Quantization[form].value, "group_size": noted}
    # A reader of -1 alone learns nothing from another size: the content, which passports name, is the same without it.
    with_note, graph = content_hash(tmp_path), saved.read_bytes()
    saved.write_bytes(re.sub(rb"\n\s*<group_size [^\n]*", b"", graph))
    assert saved.read_bytes() != graph
    assert (content_hash(tmp_path) == with_note) is (noted != "-1")


@pytest.mark.parametrize(
    ("device", "small", "form"),
    [
        (None, 0, "INT4_INT8"),
        (None, math.inf, "INT4_INT8"),
        ("npu", 0, "INT4_INT8_CW"),
        ("cpu", 0, "INT4_INT8"),
        ("npu", math.inf, "INT8_SYM"),
        ("cpu", math.inf, "INT4_INT8"),
    ],
)
def test_the_form_suits_the_device_and_the_size_of_the_model(make_gguf, monkeypatch, device, small, form):
    monkeypatch.setattr(conversion, "_INT8_ON_NPU", small)
    chosen, reason = GgufFile(make_gguf()).form_for(device)
    assert chosen == Quantization[form]
    assert reason


@pytest.mark.parametrize("quantization", ["Q4_1", "Q5_0"])
def test_the_tokenizer_comes_from_the_metadata_alone(make_gguf, tmp_path, quantization):
    gguf = GgufFile(make_gguf(quantization=GGMLQuantizationType[quantization]))
    target, scratch = tmp_path / "target", tmp_path / "scratch"
    target.mkdir()
    scratch.mkdir()
    write_tokenizer(gguf, target, scratch)
    tokenizer, tokens = openvino_genai.Tokenizer(target), gguf.get("tokenizer.ggml.tokens")
    ids = [int(token) for token in tokenizer.encode("hello", add_special_tokens=False).input_ids.data[0]]
    assert [tokens[token] for token in ids] == ["he", "ll", "o"]
    assert tokenizer.decode(ids) == "hello"


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"junk" * 100])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    (tmp_path / "bad.gguf").write_bytes(damage)
    with pytest.raises(ConversionFailed, match=r"bad\.gguf"):
        GgufFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": GGMLQuantizationType.Q2_K, "hidden": 256}, "has tensors in Q2_K; OpenVINO reads .*Q8_0"),
        ({"architecture": "mamba"}, "'mamba'; those that can be converted are llama"),
        ({"architecture": "smollm3"}, "'smollm3'; those that can be converted are llama"),
        ({"extra": {"rope_freqs.weight": (8,)}}, r"scales its rotary frequencies \(rope_freqs.* end in -ov"),
        ({"scaling": RopeScalingType.YARN}, r"scales its rotary embedding \(yarn\)"),
        ({"window": 64}, "attends to a sliding window of 64 tokens"),
        ({"tokenizer": "llama"}, "has a tokenizer of the kind llama, not gpt2"),
        ({"extra": {"blk.0.attn_q.bias": (64,)}}, r"tensors that no llama model has \(blk\.0\.attn_q\.bias\)"),
        ({"rows": 256}, "has 288 tokens and vectors for 256 of them"),
    ],
)
def test_a_file_that_the_graph_would_not_compute_rightly_is_refused_with_the_reason(make_gguf, options, reason):
    with pytest.raises((ConversionFailed, SourceRejected), match=reason):
        GgufFile(make_gguf(**options))
