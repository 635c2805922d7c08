"""Builds a cross-encoder of the BERT family as one OpenVINO graph, from the tokens of a pair to its logits.

Inputs `input_ids`, `attention_mask` and, where the model has token types, `token_type_ids`, all i64 [batch, length];
output `logits`, f32 [batch, labels]. The shapes are dynamic and may be reshaped to static ones.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import Node
from openvino import opset13 as op

from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    INPUT_IDS,
    Tensors,
    Weights,
    hidden_states,
    linear,
    name_port,
    text_input,
)
from worker_node.tasks.rerank.files.config import CrossEncoderConfig
from worker_node.tasks.rerank.names import LOGITS, TOKEN_TYPES

# Tensors that a checkpoint may carry and the classifier does not use.
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")


def build_cross_encoder(config: CrossEncoderConfig, tensors: Tensors) -> ov.Model:
    """Build the graph.

    Raises ConversionFailed when a tensor is missing, has another shape than the configuration says, or is left over.
    """
    bert, prefix = config.bert, config.family.prefix
    weights = Weights(tensors, frozenset(prefix + name for name in _UNUSED))
    parameters = [text_input(INPUT_IDS), text_input(ATTENTION_MASK)]
    types = None
    if bert.type_vocab_size > 1:
        types = text_input(TOKEN_TYPES)
        parameters.append(types)
    hidden = hidden_states(
        bert,
        weights,
        parameters[0],
        op.convert(parameters[1], "f32"),
        types=types,
        prefix=prefix,
        first_position=config.first_position,
    )
    logits = _head(config, weights, op.gather(hidden, op.constant(np.int64(0)), op.constant(np.int64(1))))
    weights.expect_all_used()
    name_port(logits.output(0), LOGITS)
    return ov.Model([op.result(logits)], parameters, "cross_encoder")


def _head(config: CrossEncoderConfig, weights: Weights, first: Node) -> Node:
    """The classifier, over the vector of the first token, f32 [batch, hidden]."""
    size, labels = config.bert.hidden_size, config.labels
    if config.family.offset:
        hidden = op.tanh(linear(weights, "classifier.dense", first, size, size))
        return linear(weights, "classifier.out_proj", hidden, labels, size)
    pooled = op.tanh(linear(weights, f"{config.family.prefix}pooler.dense", first, size, size))
    return linear(weights, "classifier", pooled, labels, size)
