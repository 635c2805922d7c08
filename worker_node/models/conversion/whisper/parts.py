"""What encoder and decoder of a Whisper network have in common, as OpenVINO nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from openvino import Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.pooling import i64

_LAYER_NORM_EPSILON = 1e-5
# What a checkpoint may hold beyond the network: a mask that the graph computes.
_UNUSED = frozenset({"decoder.mask", "alignment_heads"})


class WhisperWeights:
    """Tensors by name, with a record of which were used."""

    def __init__(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        self._tensors = tensors
        self._left = set(tensors) - _UNUSED

    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]:
        """The tensor; raises ConversionFailed when it is missing or has another shape."""
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise ConversionFailed(f"the weights have no tensor {name}") from error
        if tensor.shape != shape:
            raise ConversionFailed(f"tensor {name} has shape {tensor.shape}; the model's sizes need {shape}")
        self._left.discard(name)
        return tensor

    def expect_all_used(self) -> None:
        """Raises ConversionFailed when a tensor has no place in the network."""
        if self._left:
            raise ConversionFailed(f"tensors without a place in a Whisper network: {', '.join(sorted(self._left)[:8])}")


def linear(weights: WhisperWeights, name: str, x: Node, rows: int, columns: int, *, bias: bool = True) -> Node:
    """`x @ W.T + b` for x [batch, length, columns]."""
    product = op.matmul(x, weights(f"{name}.weight", rows, columns), False, True)
    if not bias:
        return product
    return op.add(product, weights(f"{name}.bias", rows).reshape(1, 1, rows))


def layer_norm(weights: WhisperWeights, name: str, x: Node, size: int) -> Node:
    """Normalise the last axis, then scale and shift."""
    normal = op.mvn(x, i64(-1), True, _LAYER_NORM_EPSILON, "INSIDE_SQRT")
    scaled = op.multiply(normal, weights(f"{name}.weight", size).reshape(1, 1, size))
    return op.add(scaled, weights(f"{name}.bias", size).reshape(1, 1, size))


def split_heads(x: Node, heads: int, size: int) -> Node:
    """[batch, length, size] to [batch, heads, length, size / heads]."""
    return op.transpose(op.reshape(x, i64(0, 0, heads, size // heads), special_zero=True), i64(0, 2, 1, 3))


def merge_heads(x: Node, size: int) -> Node:
    """[batch, heads, length, size / heads] to [batch, length, size]."""
    return op.reshape(op.transpose(x, i64(0, 2, 1, 3)), i64(0, 0, size), special_zero=True)


def feed_forward(weights: WhisperWeights, block: str, x: Node, size: int) -> Node:
    """The block's MLP with its residual connection."""
    inner = linear(weights, f"{block}.mlp.0", layer_norm(weights, f"{block}.mlp_ln", x, size), 4 * size, size)
    return op.add(x, linear(weights, f"{block}.mlp.2", op.gelu(inner, "erf"), size, 4 * size))
