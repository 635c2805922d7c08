"""Matrices are stored in fewer bits as nncf stores them, which is no part of a node."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.convert.gguf import quantise, stored_matrix

NAME = "blk.0.ffn_up.weight"


class OneTensor:
    """A GGUF file with one matrix."""

    def __init__(self, values, name=NAME):
        self.values, self.name = values, name

    def shapes(self):
        return {self.name: self.values.shape}

    def tensor(self, _name, rows):
        return self.values[rows]


def stored(model):
    """The constants of a graph with more than one number, as they are stored."""
    found = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    return [np.array(node.data).tobytes() for node in found if np.prod(node.get_output_shape(0)) > 8]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["INT8_SYM", "INT4_SYM"])
def test_a_matrix_is_stored_as_nncf_stores_it(monkeypatch, form):
    # It reports its use to its makers unless it runs in a CI.
    monkeypatch.setenv("NNCF_CI", "1")
    nncf = pytest.importorskip("nncf")
    values = np.random.default_rng(3).normal(size=(96, 128)).astype(np.float16)

    def product(weights):
        x = op.parameter([-1, 128], np.float32)
        return ov.Model([op.matmul(x, weights, False, True)], [x])

    options = {"group_size": 64, "all_layers": True} if form == "INT4_SYM" else {}
    plain = product(op.convert(op.constant(values, name=NAME), "f32"))
    expected = nncf.compress_weights(plain, mode=nncf.CompressWeightsMode[form], **options)
    assert stored(product(stored_matrix(OneTensor(values), NAME, Quantization[form]))) == stored(expected)


@pytest.mark.parametrize(
    ("name", "form", "kind"),
    [
        (NAME, "INT4_INT8", "i4"),
        ("blk.0.attn_q.weight", "INT4_INT8", "i8"),
        ("blk.0.attn_q.weight", "INT4_SYM", "i4"),
        ("token_embd.weight", "INT4_SYM", "i8"),
        (NAME, "INT8_SYM", "i8"),
        (NAME, "INT4_INT8_CW", "i4"),
        ("blk.0.attn_q.weight", "INT4_INT8_CW", "i8"),
    ],
)
def test_each_form_has_its_matrices_in_four_bits(name, form, kind):
    node = stored_matrix(OneTensor(np.ones((8, 64), np.float32), name), name, Quantization[form])
    kinds = set()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
        kinds.add(node.get_element_type().get_type_name())
    assert kind in kinds


def test_the_form_for_npus_has_one_scale_a_row_and_takes_rows_of_any_length():
    values = np.random.default_rng(5).normal(size=(8, 96)).astype(np.float32)
    node = stored_matrix(OneTensor(values), NAME, Quantization.INT4_INT8_CW)
    model = ov.Model([op.result(node)], [])
    found = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})[0]
    # One of 16 steps: the highest level is one step below the largest magnitude.
    assert (np.abs(found - values) <= np.abs(values).max(axis=1, keepdims=True) / 8 * 1.01).all()
    (scales,) = [c for c in model.get_ops() if c.friendly_name == f"{NAME}/scale"]
    assert list(scales.shape) == [8, 1]


def test_a_group_of_zeros_stays_zeros():
    numbers, scales = quantise(np.zeros((2, 8), np.float32), 4, 4)
    assert not numbers.any()
    assert (scales > 0).all()


def test_rows_that_are_no_multiple_of_a_group_are_refused_with_a_form_that_fits():
    file = OneTensor(np.ones((8, 96), np.float32))
    with pytest.raises(ConversionFailed, match=r"blk\.0\.ffn_up\.weight has rows of 96 .*; choose int8_sym"):
        stored_matrix(file, NAME, Quantization.INT4_SYM)
    with pytest.raises(ConversionFailed, match="not in f16"):
        stored_matrix(file, NAME, Quantization.F16)
