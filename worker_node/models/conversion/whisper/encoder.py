"""The encoder: from a mel spectrogram of 30 s to hidden states."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import Node
from openvino import opset13 as op

from worker_node.models.conversion.pooling import i64, name_port
from worker_node.models.conversion.whisper.dimensions import Dimensions
from worker_node.models.conversion.whisper.parts import (
    WhisperWeights,
    feed_forward,
    layer_norm,
    linear,
    merge_heads,
    split_heads,
)


def build_encoder(sizes: Dimensions, weights: WhisperWeights) -> ov.Model:
    """Input `input_features` f32 [batch, n_mels, 2 × n_audio_ctx].

    Output `last_hidden_state` f32 [batch, n_audio_ctx, n_audio_state].
    The port names are those that openvino-genai's WhisperPipeline looks for.
    """
    features = op.parameter([-1, sizes.n_mels, 2 * sizes.n_audio_ctx], np.float32, name="input_features")
    name_port(features.output(0), "input_features")
    state = sizes.n_audio_state
    x = op.gelu(_convolution(weights, "encoder.conv1", features, state, sizes.n_mels, stride=1), "erf")
    x = op.gelu(_convolution(weights, "encoder.conv2", x, state, state, stride=2), "erf")
    x = op.transpose(x, i64(0, 2, 1))
    positions = weights("encoder.positional_embedding", sizes.n_audio_ctx, state)
    x = op.add(x, positions.reshape(1, *positions.shape))
    for layer in range(sizes.n_audio_layer):
        x = _block(sizes, weights, f"encoder.blocks.{layer}", x)
    hidden = layer_norm(weights, "encoder.ln_post", x, state)
    name_port(hidden.output(0), "last_hidden_state")
    return ov.Model([op.result(hidden)], [features], "whisper_encoder")


def _convolution(weights: WhisperWeights, name: str, x: Node, out: int, channels: int, *, stride: int) -> Node:
    product = op.convolution(x, weights(f"{name}.weight", out, channels, 3), [stride], [1], [1], [1])
    return op.add(product, weights(f"{name}.bias", out).reshape(1, out, 1))


def _block(sizes: Dimensions, weights: WhisperWeights, block: str, x: Node) -> Node:
    state, heads = sizes.n_audio_state, sizes.n_audio_head
    normal = layer_norm(weights, f"{block}.attn_ln", x, state)
    query, key, value = (
        split_heads(linear(weights, f"{block}.attn.{part}", normal, state, state, bias=part != "key"), heads, state)
        for part in ("query", "key", "value")
    )
    attended = merge_heads(op.scaled_dot_product_attention(query, key, value), state)
    x = op.add(x, linear(weights, f"{block}.attn.out", attended, state, state))
    return feed_forward(weights, block, x, state)
