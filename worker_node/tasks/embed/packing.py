"""Several texts in one row on the NPU: `npu_packing`.

A row of one text is padded to the next length that is compiled. In a packed row texts stand one after another: a token
attends to those of its own text only (the mask is block-diagonal), positions restart with each text, and each text has
a vector of its own. On the emulated NPU that gives 2.3 to 5.1 times the texts per second (docs/performance.md)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import cast

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as op

from worker_node.encoders.jobs import ATTENTION_MASK, INPUT_IDS
from worker_node.encoders.static import StaticEncoder
from worker_node.engines.protocol import EngineSpec
from worker_node.scheduling.texts import PackingLimits, Waiting
from worker_node.tasks.embed.options import StaticOptions

# Measured on the emulated NPU (docs/performance.md).
_RUN_OVERHEAD_TOKENS = 32


class StaticEmbeddingRunner(StaticEncoder):
    """The engine of the NPU: a text in each row, or as many as fit with `npu_packing`."""

    options = StaticOptions

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        options = cast("StaticOptions", self._options)
        self._packing = PackingLimits(options.npu_buckets, _RUN_OVERHEAD_TOKENS) if options.npu_packing else None
        self._limits = self._packing or self._limits

    def shaped(self, model: ov.Model, length: int) -> ov.Model:
        if self._packing is None:
            return super().shaped(model, length)
        try:
            return packed_encoder(model, length, self._packing.most_texts(length))
        except CannotPack as error:
            raise RuntimeError(f"this model cannot be packed: {error}; set npu_packing = false") from None

    def length_of(self, batch: list[Waiting]) -> int:
        return super().length_of(batch) if self._packing is None else self._packing.computed(batch)

    def inputs(self, batch: list[Waiting], shape: tuple[int, int]) -> dict[str, npt.NDArray[np.int64]]:
        if self._packing is None:
            return super().inputs(batch, shape)
        ids, positions, segments = self._jobs.packed(batch, shape[1])
        return {INPUT_IDS: ids, POSITION_IDS: positions, SEGMENT_IDS: segments}


POSITION_IDS = "position_ids"
# The number of the text that a token is of, from 1; padding is of text 0.
SEGMENT_IDS = "segment_ids"

_OTHER_TEXT = -10000.0  # as for padding in `models.convert.encoder`
_MIN_TOKENS = 1e-9


class _Vector(Enum):
    """The token vectors that the vector of a text is made of."""

    MEAN = auto()
    FIRST = auto()
    LAST = auto()


class CannotPack(Exception):
    """The graph is not that of a sentence encoder as this node builds them; the message says what it lacks."""


def packed_encoder(model: ov.Model, length: int, texts: int) -> ov.Model:
    """Return the encoder for rows of `length` tokens of up to so many texts; `model` is used up.

    Inputs `input_ids`, `position_ids` and `segment_ids`, i64 [1, length]; output f32 [texts, dimensions], with row i
    that of segment i + 1, named as that of `model`. Raises CannotPack.
    """
    inputs = {port.any_name: port.get_node() for port in model.inputs}
    if set(inputs) != {INPUT_IDS, ATTENTION_MASK}:
        raise CannotPack(f"its inputs are {', '.join(sorted(inputs))}, not {INPUT_IDS} and {ATTENTION_MASK}")
    ids = inputs[INPUT_IDS]
    positions, segments = _input(POSITION_IDS, length), _input(SEGMENT_IDS, length)
    end, hidden, kind = _end(model)
    _restart_positions(model, positions)
    _keep_texts_apart(model, segments)
    names = model.outputs[0].get_names()
    end.replace_source_output(_pool(hidden, positions, segments, texts, kind).output(0))
    model.outputs[0].set_names(names)
    packed = ov.Model(model.get_results(), [ids, positions, segments], "packed_sentence_encoder")
    # Also where nothing changes: every node then computes its shape.
    packed.reshape({port.any_name: [1, length] for port in packed.inputs})
    return packed


def _input(name: str, length: int) -> Node:
    port = op.parameter([1, length], np.int64)
    port.set_friendly_name(name)
    port.output(0).set_names({name})
    return port


def _axes(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _of_type(model: ov.Model, kind: str) -> Iterator[Node]:
    return (node for node in model.get_ordered_ops() if node.get_type_name() == kind)


def _restart_positions(model: ov.Model, positions: Node) -> None:
    """Look up the vector of each token's position, where the graph has the first ones in their order."""
    slices = list(_of_type(model, "Slice"))
    if len(slices) != 1:
        raise CannotPack(f"it cuts {len(slices)} tables to the length of a text, not its table of positions alone")
    (readers,) = (list(cut.get_target_inputs()) for cut in slices[0].outputs())
    if [reader.get_node().get_type_name() for reader in readers] != ["Unsqueeze"]:
        raise CannotPack("its positions are not added to every row")
    found = op.gather(slices[0].input_value(0), positions, _axes(0))
    for reader in readers[0].get_node().output(0).get_target_inputs():
        reader.replace_source_output(found.output(0))


def _keep_texts_apart(model: ov.Model, segments: Node) -> None:
    same = op.equal(op.unsqueeze(segments, _axes(1)), op.unsqueeze(segments, _axes(2)))
    other = op.subtract(np.float32(1.0), op.convert(same, "f32"))
    mask = op.unsqueeze(op.multiply(other, np.float32(_OTHER_TEXT)), _axes(1))
    attentions = list(_of_type(model, "ScaledDotProductAttention"))
    if not attentions or any(node.get_input_size() < 4 for node in attentions):
        raise CannotPack("it has no attention with a mask")
    for node in attentions:
        node.input(3).replace_source_output(mask.output(0))


def _end(model: ov.Model) -> tuple[ov.Input, Output, _Vector]:
    """Where the pooled vector goes, the token vectors that it is made of, and how."""
    (result,) = model.get_results()
    end = result.input(0)
    if end.get_source_output().get_node().get_type_name() == "NormalizeL2":
        end = end.get_source_output().get_node().input(0)
    pooled = end.get_source_output().get_node()
    match pooled.get_type_name():
        case "Gather":
            return end, pooled.input_value(0), _Vector.FIRST
        case "Divide":
            return end, _weighted(pooled.input_value(0).get_node()), _Vector.MEAN
        case "ReduceSum":
            return end, _weighted(pooled), _Vector.LAST
    raise CannotPack(f"its vector is made by {pooled.get_type_name()}")


def _weighted(total: Node) -> Output:
    """The token vectors in a sum of weighted ones."""
    weighted = total.input_value(0).get_node() if total.get_input_size() else total
    if total.get_type_name() != "ReduceSum" or weighted.get_type_name() != "Multiply":
        raise CannotPack("its vector is not a sum of token vectors")
    return weighted.input_value(0)


def _pool(hidden: Output, positions: Node, segments: Node, texts: int, kind: _Vector) -> Node:
    """The vectors of the texts, f32 [texts, size]: zeros for texts that are not there."""
    numbers = op.constant(np.arange(1, texts + 1, dtype=np.int64).reshape(1, texts, 1))
    weights = op.convert(op.equal(numbers, op.unsqueeze(segments, _axes(1))), "f32")
    if kind is _Vector.MEAN:
        tokens = op.reduce_sum(weights, _axes(2), keep_dims=True)
        weights = op.divide(weights, op.maximum(tokens, np.float32(_MIN_TOKENS)))
    else:
        wanted: Node = op.constant(np.zeros((1, 1, 1), np.int64))
        if kind is _Vector.LAST:
            tokens = op.reduce_sum(op.convert(weights, "i64"), _axes(2), keep_dims=True)
            wanted = op.subtract(tokens, op.constant(np.ones((1, 1, 1), np.int64)))
        chosen = op.equal(op.unsqueeze(positions, _axes(1)), wanted)
        weights = op.multiply(weights, op.convert(chosen, "f32"))
    return op.squeeze(op.matmul(weights, hidden, transpose_a=False, transpose_b=False), _axes(0))
