"""From token vectors to one vector a text, inside the graph."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as op

# The names by which engines know the encoder's ports.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
EMBEDDING = "embedding"

# What sentence-transformers divides by at least: the number of tokens (mean pooling) and the norm of the vector.
_MIN_TOKENS = 1e-9
_MIN_NORM = 1e-12


class Pooling(StrEnum):
    """How the token vectors of a text become one vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


def i64(*values: int) -> Node:
    """A constant shape, axis list or index list."""
    return op.constant(np.array(values, dtype=np.int64))


def name_port(output: Output, name: str) -> None:
    """Give a port the one name by which it is asked for."""
    output.get_node().set_friendly_name(name)
    output.set_names({name})


def pool(hidden: Node | Output, mask: Node, pooling: Pooling, *, normalise: bool) -> Node:
    """The vectors, f32 [batch, size], of token vectors, f32 [batch, length, size], under a mask, i64 [batch, length].

    A text without any token gives zeros (mean, last), never NaN. Tokens are counted in integers: devices compute
    floats in less than f32, and in bf16, 256 and 1 is 256.
    """
    if pooling is Pooling.CLS:
        vector = op.gather(hidden, op.constant(np.int64(0)), op.constant(np.int64(1)))
    elif pooling is Pooling.LAST:
        # Wherever the padding is: the token up to which the mask has summed up to all of it.
        counted = op.convert(mask, "i32")
        end = op.equal(op.cum_sum(counted, op.constant(np.int64(1))), op.reduce_sum(counted, i64(1), keep_dims=True))
        last = op.multiply(op.convert(end, "f32"), op.convert(mask, "f32"))
        vector = op.reduce_sum(op.multiply(hidden, op.unsqueeze(last, i64(2))), i64(1), keep_dims=False)
    else:
        weights = op.unsqueeze(op.convert(mask, "f32"), i64(2))
        total = op.reduce_sum(op.multiply(hidden, weights), i64(1), keep_dims=False)
        counted = op.reduce_sum(op.convert(mask, "i32"), i64(1), keep_dims=True)
        tokens = op.maximum(op.convert(counted, "f32"), np.float32(_MIN_TOKENS))
        vector = op.divide(total, tokens)
    return op.normalize_l2(vector, i64(1), _MIN_NORM**2, "max") if normalise else vector


def finish(vector: Node, parameters: list[Node]) -> ov.Model:
    """The model that ends in `vector`, with its output named as engines expect it."""
    name_port(vector.output(0), EMBEDDING)
    return ov.Model([op.result(vector)], parameters, "sentence_encoder")
