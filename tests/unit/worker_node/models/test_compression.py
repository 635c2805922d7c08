"""Compressed weights are bit for bit nncf's, which is no part of a node."""

import re

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.convert.compression import compress, compress_encoder, quantise
from worker_node.models.convert.encoder import build_encoder, read_bert_config, sentence_config_of
from worker_node.models.convert.generation import restore_exact_weights
from worker_node.models.convert.gguf import GgufFile, import_graph, readable_file
from worker_node.models.convert.job import ConversionJob
from worker_node.models.directory import compression_of

pytestmark = pytest.mark.slow

GENERATED_NAME = re.compile(r"(?<=_)\d+(?=[\"/])")
JOB = ConversionJob(
    source="", target="", scratch="", id="m", format="safetensors", licence="", origin="", source_sha256={}
)
FORMS = (Quantization.INT8_SYM, Quantization.INT4_SYM, Quantization.INT4_INT8)


@pytest.fixture(scope="module")
def nncf():
    """The oracle. It takes seconds to import, and reports its use to its makers unless it runs in a CI."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNCF_CI", "1")
        return pytest.importorskip("nncf")


def saved(model, directory):
    """The weights of a graph as they are stored, and the graph without names that count up and notes at its end."""
    ov.save_model(model, directory / "model.xml", compress_to_fp16=False)
    graph = GENERATED_NAME.sub("N", (directory / "model.xml").read_text())
    return (directory / "model.bin").read_bytes(), graph.rpartition("<rt_info>")[0]


def by_nncf(nncf, model, form):
    """As docs/models.md describes the forms, in nncf's terms."""
    int8 = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    int4 = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 64, "backup_mode": nncf.BackupMode.INT8_SYM}
    if form is Quantization.INT8_SYM:
        return nncf.compress_weights(model, **int8)
    if form is Quantization.INT4_SYM:
        return nncf.compress_weights(model, **int4)
    others = [
        reader.get_node().friendly_name
        for constant in model.get_ordered_ops()
        if re.match(r"blk\.\d+\.(?!ffn_(gate|up))\w+\.weight", constant.friendly_name)
        for convert in constant.output(0).get_target_inputs()
        for reader in convert.get_node().output(0).get_target_inputs()
        if convert.get_node().get_type_name() == "Convert"
    ]
    return nncf.compress_weights(
        nncf.compress_weights(model, ignored_scope=nncf.IgnoredScope(names=others), **int4), **int8
    )


@pytest.mark.parametrize(("architecture", "stored_twice"), [("llama", False), ("qwen2", True)])
# More than 5 s on a busy core: nncf's import.
def test_a_generation_model_is_stored_as_nncf_stores_it(nncf, make_gguf, tmp_path, architecture, stored_twice):
    gguf = GgufFile(make_gguf(architecture=architecture, stored_twice=stored_twice))
    (tmp_path / "target").mkdir()
    import_graph(readable_file(gguf, tmp_path), tmp_path / "target", tmp_path)

    def fresh(room):
        (tmp_path / room).mkdir()
        model = ov.Core().read_model(tmp_path / "openvino_model.xml")
        restore_exact_weights(model, gguf, tmp_path / room)
        return model

    for form in FORMS:
        expected = saved(by_nncf(nncf, fresh(f"nncf-{form}"), form), tmp_path / f"nncf-{form}")
        stored = saved(compress(fresh(f"own-{form}"), form), tmp_path / f"own-{form}")
        assert stored == expected
        assert compression_of(tmp_path / f"own-{form}" / "model.xml") == form
    assert "i4" not in saved(compress(fresh("int8"), Quantization.INT8_SYM), tmp_path / "int8")[1]


def test_an_encoder_is_stored_as_nncf_stores_it(nncf, make_bert, tmp_path):
    directory, tensors = make_bert()
    bert = read_bert_config(directory)

    def fresh():
        return build_encoder(bert, sentence_config_of(directory, JOB), tensors)

    for room in ("nncf", "own"):
        (tmp_path / room).mkdir()
    expected = saved(by_nncf(nncf, fresh(), Quantization.INT8_SYM), tmp_path / "nncf")
    assert saved(compress_encoder(fresh()), tmp_path / "own") == expected


def test_the_largest_magnitude_takes_the_lowest_level_whatever_its_sign():
    numbers, scales = quantise(np.array([[-8.0, 4.0, 7.0, 1.0], [8.0, -4.0, -7.0, -1.0]], np.float32), 4, 4)
    assert numbers[:, 0].tolist() == [[-8, 4, 7, 1], [-8, 4, 7, 1]]
    assert scales.ravel().tolist() == [1.0, -1.0]


def test_halves_are_rounded_to_even_numbers_and_what_is_out_of_range_is_cut():
    numbers, scales = quantise(np.array([[-128.0, 128.0, 0.5, 1.5, 2.5, -0.5]], np.float32), 8, 6)
    assert numbers.ravel().tolist() == [-128, 127, 0, 2, 2, 0]
    assert scales.ravel().tolist() == [1.0]


def test_a_group_of_zeros_stays_zeros():
    numbers, scales = quantise(np.zeros((2, 8), np.float32), 4, 4)
    assert not numbers.any()
    assert (scales > 0).all()


def test_rows_that_are_more_than_one_block_are_quantised_as_if_alone():
    weights = np.random.default_rng(3).normal(size=(1030, 512)).astype(np.float16)
    numbers, scales = quantise(weights, 4, 64)
    for row in (0, 511, 512, 1024, 1029):
        alone = quantise(weights[row : row + 1], 4, 64)
        assert (numbers[row] == alone[0][0]).all()
        assert (scales[row] == alone[1][0]).all()


def test_rows_that_are_no_multiple_of_a_group_are_refused_with_a_form_that_fits():
    x = op.parameter([-1, 96], np.float32)
    matrix = op.constant(np.ones((8, 96), np.float16), name="blk.0.attn_q.weight")
    model = ov.Model([op.matmul(x, op.convert(matrix, "f32"), False, True)], [x])
    with pytest.raises(ConversionFailed, match=r"blk\.0\.attn_q\.weight has rows of 96 .*; choose int8_sym"):
        compress(model, Quantization.INT4_SYM)
    with pytest.raises(ConversionFailed, match="not kept in f32"):
        compress(model, Quantization.F32)
    assert compress(model, Quantization.F16) is model
