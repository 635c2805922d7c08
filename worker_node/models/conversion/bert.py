"""Builds a sentence encoder of the BERT family as one OpenVINO graph, from token ids to the finished vector.

Inputs `input_ids` and `attention_mask`, both i64 [batch, length]; output `embedding`, f32 [batch, dimensions]. The
shapes are dynamic and may be reshaped to static ones. A row whose mask is all zeros gives no NaN.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.pooling import ATTENTION_MASK, INPUT_IDS, finish, i64, name_port, pool
from worker_node.models.conversion.sentence_config import BertConfig, SentenceConfig

# Added to the attention score of a padding token. exp(-10000) is zero in every float type, and unlike -inf it leaves
# a fully masked row finite, in f16 too.
_MASKED = -10000.0
# Tensors that a BertModel carries and a sentence encoder does not use.
_UNUSED = frozenset({"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"})

Tensors = dict[str, NDArray[np.float32]]


def build_encoder(bert: BertConfig, sentence: SentenceConfig, tensors: Tensors) -> ov.Model:
    """Build the graph.

    Raises ConversionFailed when a tensor is missing, has another shape than the configuration says, or is left over.
    """
    weights = Weights(tensors, _UNUSED)
    ids, mask = text_input(INPUT_IDS), text_input(ATTENTION_MASK)
    present = op.convert(mask, "f32")
    hidden = hidden_states(bert, weights, ids, present)
    weights.expect_all_used()
    vector = pool(hidden, mask, sentence.pooling, normalise=sentence.normalise)
    return finish(vector, [ids, mask])


def text_input(name: str) -> Node:
    """An input of the graph: i64 [batch, length]."""
    port = op.parameter([-1, -1], np.int64)
    name_port(port.output(0), name)
    return port


def hidden_states(
    bert: BertConfig,
    weights: Weights,
    ids: Node,
    present: Node,
    *,
    types: Node | None = None,
    prefix: str = "",
    first_position: int = 0,
) -> Node:
    """Token vectors, f32 [batch, length, hidden], of token ids under a mask (`present`, f32 [batch, length]).

    Without `types` all tokens are of type 0. The tensors' names begin with `prefix`; `first_position` is that of the
    first token. Raises ConversionFailed as `build_encoder`.
    """
    absent = op.multiply(op.subtract(np.float32(1.0), present), np.float32(_MASKED))
    attention_mask = op.unsqueeze(absent, i64(1, 2))
    hidden = _embeddings(bert, weights, ids, types, prefix, first_position)
    for layer in range(bert.num_hidden_layers):
        hidden = _layer(bert, weights, f"{prefix}encoder.layer.{layer}", hidden, attention_mask)
    return hidden


class Weights:
    """The tensors by name, but for `unused` ones; knows which have been asked for."""

    def __init__(self, tensors: Tensors, unused: frozenset[str]) -> None:
        self._tensors = tensors
        self._left = set(tensors) - unused

    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]:
        """The tensor of that name and shape. Raises ConversionFailed."""
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise ConversionFailed(f"the weights hold no tensor {name}") from error
        if tensor.shape != shape:
            raise ConversionFailed(f"tensor {name} has shape {tensor.shape}, its configuration says {shape}")
        self._left.discard(name)
        return tensor

    def expect_all_used(self) -> None:
        """Raise ConversionFailed, naming them, if tensors are left over: then this is another model than was built."""
        if self._left:
            raise ConversionFailed(f"tensors without a place in a BertModel: {', '.join(sorted(self._left))}")


def linear(weights: Weights, name: str, x: Node, rows: int, columns: int) -> Node:
    """A fully connected layer to `rows` numbers, over the last axis of `x`, which has `columns`."""
    bias = weights(f"{name}.bias", rows)
    return op.add(op.matmul(x, weights(f"{name}.weight", rows, columns), False, True), bias)


def _layer_norm(weights: Weights, name: str, x: Node, config: BertConfig) -> Node:
    size = config.hidden_size
    normal = op.mvn(x, i64(-1), True, config.layer_norm_eps, "INSIDE_SQRT")
    scaled = op.multiply(normal, weights(f"{name}.weight", size).reshape(1, 1, size))
    return op.add(scaled, weights(f"{name}.bias", size).reshape(1, 1, size))


def _embeddings(
    config: BertConfig, weights: Weights, ids: Node, types: Node | None, prefix: str, first_position: int
) -> Node:
    size, name = config.hidden_size, f"{prefix}embeddings"
    words = weights(f"{name}.word_embeddings.weight", config.vocab_size, size)
    positions = weights(f"{name}.position_embeddings.weight", config.max_position_embeddings, size)[first_position:]
    rows = weights(f"{name}.token_type_embeddings.weight", config.type_vocab_size, size)
    length = op.gather(op.shape_of(ids), i64(1), i64(0))
    if types is None:
        # Every token is of type 0: its row joins the positions once and for all.
        positions = positions + rows[0]
    places = op.slice(op.constant(positions), i64(0), length, i64(1), i64(0))
    total = op.add(op.gather(op.constant(words), ids, i64(0)), op.unsqueeze(places, i64(0)))
    if types is not None:
        total = op.add(total, op.gather(op.constant(rows), types, i64(0)))
    return _layer_norm(weights, f"{name}.LayerNorm", total, config)


def _layer(config: BertConfig, weights: Weights, name: str, x: Node, mask: Node) -> Node:
    size, inner = config.hidden_size, config.intermediate_size
    query, key, value = (
        _heads(linear(weights, f"{name}.attention.self.{part}", x, size, size), config)
        for part in ("query", "key", "value")
    )
    attended = op.scaled_dot_product_attention(query, key, value, mask)
    merged = op.reshape(op.transpose(attended, i64(0, 2, 1, 3)), i64(0, 0, size), special_zero=True)
    projected = linear(weights, f"{name}.attention.output.dense", merged, size, size)
    x = _layer_norm(weights, f"{name}.attention.output.LayerNorm", op.add(projected, x), config)
    wide = op.gelu(linear(weights, f"{name}.intermediate.dense", x, inner, size), config.gelu_mode)
    narrow = linear(weights, f"{name}.output.dense", wide, size, inner)
    return _layer_norm(weights, f"{name}.output.LayerNorm", op.add(narrow, x), config)


def _heads(x: Node, config: BertConfig) -> Node:
    split = op.reshape(x, i64(0, 0, config.num_attention_heads, config.head_size), special_zero=True)
    return op.transpose(split, i64(0, 2, 1, 3))
