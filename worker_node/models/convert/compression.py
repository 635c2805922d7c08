"""Stores the weights of a model in fewer bits, bit for bit as nncf 3.4 does (`compress_weights`, symmetric modes).

nncf itself is a test dependency, the oracle of `test_compression.py`: with scipy and scikit-learn it takes 160 MB, and
twenty seconds of CPU time for the smallest model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Input, Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization

# The smallest group that the NPU path accepts; one scale a row ruins the answers of a 135M model.
_GROUP = 64
# Layers of GGUF models. The embedding table and the output matrix stay in int8 in every form.
_LAYERS = re.compile(r"blk\.\d+\..*")
# The matrices that bear 4 bits best: two fifths of the weights for a third of the harm (docs/models.md).
_ROBUST = re.compile(r"blk\.\d+\.ffn_(gate|up)\.weight")
# What the names of constants that take 4 bits match, by form; all others take 8.
_FOUR_BITS = {
    Quantization.INT8_SYM: re.compile(r"(?!)"),
    Quantization.INT4_SYM: _LAYERS,
    Quantization.INT4_INT8: _ROBUST,
}
# Weights that are in f32 at a time: a matrix of a large model would take gigabytes.
_WEIGHTS_AT_ONCE = 1 << 18


def compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    """The model with its weights in that form, changed in place; the names of its constants are those of GGUF tensors.

    Raises ConversionFailed when the form is none for generation models, or a matrix has rows that are no multiple of
    the group.
    """
    if quantization is Quantization.F16:
        return model
    if quantization not in _FOUR_BITS:
        raise ConversionFailed(f"generation models are not kept in {quantization}")
    return _compress(model, quantization)


def compress_encoder(model: ov.Model) -> ov.Model:
    """The encoder with every matrix in int8, one scale a row, changed in place."""
    return _compress(model, Quantization.INT8_SYM)


def quantise(weights: NDArray[np.floating], bits: int, group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Whole numbers of so many bits, int8 [rows, groups, group], and what each group's are multiplied by, f32 [rows,
    groups, 1], of a matrix [rows, columns]; `columns` is a multiple of `group`.

    The number of the largest magnitude becomes the lowest level, since there is one more below zero than above it: the
    scale of a group whose largest number is positive is negative.
    """
    rows, columns = weights.shape
    numbers = np.empty((rows, columns // group, group), np.int8)
    scales = np.empty((rows, columns // group, 1), np.float32)
    levels = 1 << (bits - 1)
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        values = weights[part].astype(np.float32).reshape(-1, columns // group, group)
        lowest, highest = np.abs(values.min(axis=2, keepdims=True)), values.max(axis=2, keepdims=True)
        scale = np.where(lowest >= highest, lowest, -highest) / np.float32(levels)
        tiny = np.finfo(np.float32).eps
        scale = np.where(np.abs(scale) < tiny, tiny, scale)
        values /= scale
        numbers[part] = np.clip(np.rint(values, out=values), -levels, levels - 1, out=values)
        scales[part] = scale
    return numbers, scales


def _compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    for constant in list(_matrices(model)):
        name = constant.friendly_name
        _replace(constant, 4 if _FOUR_BITS[quantization].fullmatch(name) else 8)
    # Where nncf notes it and others look for it; `read_directory` too.
    model.set_rt_info(str(quantization), ["nncf", "weight_compression", "mode"])
    return model


def _matrices(model: ov.Model) -> Iterator[Node]:
    """The constants [rows, columns] of which rows are looked up or which are multiplied with, perhaps as f32."""
    for constant in model.get_ordered_ops():
        if constant.get_type_name() != "Constant" or len(constant.get_output_shape(0)) != 2:
            continue
        if constant.get_element_type() in {ov.Type.f16, ov.Type.f32} and any(map(_takes_rows, _readers(constant))):
            yield constant


def _readers(constant: Node) -> Iterator[Input]:
    for reader in constant.output(0).get_target_inputs():
        if reader.get_node().get_type_name() == "Convert":
            yield from reader.get_node().output(0).get_target_inputs()
        else:
            yield reader


def _takes_rows(reader: Input) -> bool:
    node, port = reader.get_node(), reader.get_index()
    if node.get_type_name() == "Gather":
        return int(port) == 0
    return node.get_type_name() == "MatMul" and int(port) == 1 and bool(node.get_attributes()["transpose_b"])


def _replace(constant: Node, bits: int) -> None:
    """Let all that read the constant read its compressed form."""
    name, (rows, columns) = constant.friendly_name, tuple(constant.get_output_shape(0))
    group = columns if bits == 8 else _GROUP
    if columns % group:
        raise ConversionFailed(
            f"{name} has rows of {columns} weights, no multiple of the {group} that share a scale in 4 bits; "
            f"choose {Quantization.INT8_SYM}"
        )
    numbers, scales = quantise(constant.data, bits, group)
    if bits == 8:
        stored, scale = op.constant(numbers.reshape(rows, columns)), scales.reshape(rows, 1)
    else:
        # Two to a byte, the first in the lower half.
        halves = numbers.reshape(-1, 2).view(np.uint8)
        packed = ov.Tensor(ov.Type.i4, numbers.shape)
        packed.data.reshape(-1).view(np.uint8)[:] = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        stored, scale = op.constant(packed, shared_memory=True), scales
    stored.friendly_name = name
    factor = op.constant(scale.astype(np.float16), name=f"{name}/scale")
    weights = op.multiply(op.convert(stored, "f16"), factor, name=f"{name}/fq_weights_1")
    if bits == 4:
        weights = op.reshape(weights, np.array([rows, columns], dtype=np.int64), special_zero=False)
    kind = constant.get_element_type()
    for reader in constant.output(0).get_target_inputs():
        direct = reader.get_node().get_type_name() != "Convert"
        widened = direct and kind != ov.Type.f16
        source = op.convert(weights, "f32", name=f"{name}/fq_weights_1/convert") if widened else weights
        reader.replace_source_output(source.output(0))
