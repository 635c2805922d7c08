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

from worker_node.errors import ConversionFailed
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
    weights = _Weights(tensors)
    ids = op.parameter([-1, -1], np.int64)
    mask = op.parameter([-1, -1], np.int64)
    name_port(ids.output(0), INPUT_IDS)
    name_port(mask.output(0), ATTENTION_MASK)
    present = op.convert(mask, "f32")
    absent = op.multiply(op.subtract(np.float32(1.0), present), np.float32(_MASKED))
    attention_mask = op.unsqueeze(absent, i64(1, 2))
    hidden = _embeddings(bert, weights, ids)
    for layer in range(bert.num_hidden_layers):
        hidden = _layer(bert, weights, f"encoder.layer.{layer}", hidden, attention_mask)
    weights.expect_all_used()
    vector = pool(hidden, present, sentence.pooling, normalise=sentence.normalise)
    return finish(vector, [ids, mask])


class _Weights:
    """The tensors by name; knows which have been asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._left = set(tensors) - _UNUSED

    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]:
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise ConversionFailed(f"the weights hold no tensor {name}") from error
        if tensor.shape != shape:
            raise ConversionFailed(f"tensor {name} has shape {tensor.shape}, its configuration says {shape}")
        self._left.discard(name)
        return tensor

    def expect_all_used(self) -> None:
        if self._left:
            raise ConversionFailed(f"tensors without a place in a BertModel: {', '.join(sorted(self._left))}")


def _linear(weights: _Weights, name: str, x: Node, rows: int, columns: int) -> Node:
    bias = weights(f"{name}.bias", rows).reshape(1, 1, rows)
    return op.add(op.matmul(x, weights(f"{name}.weight", rows, columns), False, True), bias)


def _layer_norm(weights: _Weights, name: str, x: Node, config: BertConfig) -> Node:
    size = config.hidden_size
    normal = op.mvn(x, i64(-1), True, config.layer_norm_eps, "INSIDE_SQRT")
    scaled = op.multiply(normal, weights(f"{name}.weight", size).reshape(1, 1, size))
    return op.add(scaled, weights(f"{name}.bias", size).reshape(1, 1, size))


def _embeddings(config: BertConfig, weights: _Weights, ids: Node) -> Node:
    size = config.hidden_size
    words = weights("embeddings.word_embeddings.weight", config.vocab_size, size)
    positions = weights("embeddings.position_embeddings.weight", config.max_position_embeddings, size)
    types = weights("embeddings.token_type_embeddings.weight", config.type_vocab_size, size)
    length = op.gather(op.shape_of(ids), i64(1), i64(0))
    # Every token is of type 0 where there is only one text: its row joins the positions once and for all.
    places = op.slice(op.constant(positions + types[0]), i64(0), length, i64(1), i64(0))
    total = op.add(op.gather(op.constant(words), ids, i64(0)), op.unsqueeze(places, i64(0)))
    return _layer_norm(weights, "embeddings.LayerNorm", total, config)


def _layer(config: BertConfig, weights: _Weights, name: str, x: Node, mask: Node) -> Node:
    size, inner = config.hidden_size, config.intermediate_size
    query, key, value = (
        _heads(_linear(weights, f"{name}.attention.self.{part}", x, size, size), config)
        for part in ("query", "key", "value")
    )
    attended = op.scaled_dot_product_attention(query, key, value, mask)
    merged = op.reshape(op.transpose(attended, i64(0, 2, 1, 3)), i64(0, 0, size), special_zero=True)
    projected = _linear(weights, f"{name}.attention.output.dense", merged, size, size)
    x = _layer_norm(weights, f"{name}.attention.output.LayerNorm", op.add(projected, x), config)
    wide = op.gelu(_linear(weights, f"{name}.intermediate.dense", x, inner, size), config.gelu_mode)
    narrow = _linear(weights, f"{name}.output.dense", wide, size, inner)
    return _layer_norm(weights, f"{name}.output.LayerNorm", op.add(narrow, x), config)


def _heads(x: Node, config: BertConfig) -> Node:
    split = op.reshape(x, i64(0, 0, config.num_attention_heads, config.head_size), special_zero=True)
    return op.transpose(split, i64(0, 2, 1, 3))
