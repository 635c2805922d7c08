"""The encoder and the stateful decoder of a Whisper network, as OpenVINO graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import Node
from openvino import opset13 as op
from openvino.op import util

from worker_node.models.convert.encoder import Weights, i64, layer_norm, linear, merge_heads, name_port, split_heads

_LAYER_NORM_EPSILON = 1e-5
# What a checkpoint may hold beyond the network: a mask that the graph computes.
UNUSED_TENSORS = frozenset({"decoder.mask", "alignment_heads"})


def _norm(weights: Weights, name: str, x: Node, size: int) -> Node:
    return layer_norm(weights, name, x, size, _LAYER_NORM_EPSILON)


def feed_forward(weights: Weights, block: str, x: Node, size: int) -> Node:
    """The block's MLP with its residual connection."""
    inner = linear(weights, f"{block}.mlp.0", _norm(weights, f"{block}.mlp_ln", x, size), 4 * size, size)
    return op.add(x, linear(weights, f"{block}.mlp.2", op.gelu(inner, "erf"), size, 4 * size))


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Layer counts and widths; `n_audio_ctx` counts encoder positions for 30 s of audio."""

    n_mels: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int


def build_encoder(sizes: Dimensions, weights: Weights) -> ov.Model:
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
    hidden = _norm(weights, "encoder.ln_post", x, state)
    name_port(hidden.output(0), "last_hidden_state")
    return ov.Model([op.result(hidden)], [features], "whisper_encoder")


def _convolution(weights: Weights, name: str, x: Node, out: int, channels: int, *, stride: int) -> Node:
    product = op.convolution(x, weights(f"{name}.weight", out, channels, 3), [stride], [1], [1], [1])
    return op.add(product, weights(f"{name}.bias", out).reshape(1, out, 1))


def _block(sizes: Dimensions, weights: Weights, block: str, x: Node) -> Node:
    state, heads = sizes.n_audio_state, sizes.n_audio_head
    normal = _norm(weights, f"{block}.attn_ln", x, state)
    query, key, value = (
        split_heads(linear(weights, f"{block}.attn.{part}", normal, state, state, bias=part != "key"), heads, state)
        for part in ("query", "key", "value")
    )
    attended = merge_heads(op.scaled_dot_product_attention(query, key, value), state)
    x = op.add(x, linear(weights, f"{block}.attn.out", attended, state, state))
    return feed_forward(weights, block, x, state)


# The decoder, stateful: it keeps the keys and values of the tokens so far, and those of the audio.
#
# openvino-genai drives it by port names, and the NPU plug-in rewrites it by pattern (its Whisper preparation passes).
# Four forms of the graph are therefore fixed, whatever else would compute the same:
#
# - positions are Gather → Add → Range → Unsqueeze → Tile, which the NPU form replaces by an input `cache_position`;
# - the mask is Range → three Unsqueeze → LessEqual → Select into port 3 of the attention, replaced by `attention_mask`;
# - self-attention's variables are named `past_key_values.N.decoder.keypresent.N.decoder.key`;
# - keys and values of the audio are a ReadValue read by its Assign and by the attention only; the name of its initial
#   value begins with the layer's number, and the attention's name contains `encoder_attn`.

# Added to the score of a later token. Finite: a row of −inf only would give NaN.
_MASKED = np.float32(-65504.0)


def build_decoder(sizes: Dimensions, weights: Weights) -> ov.Model:
    """Inputs `encoder_hidden_states` f32 [batch, n_audio_ctx, state], `input_ids` i64 [batch, length], `beam_idx` i32.

    Output `logits` f32 [batch, length, n_vocab]. The state is empty after a reset; the audio's keys and values are then
    computed from `encoder_hidden_states` once and kept.
    """
    return _Builder(sizes, weights).build()


class _Builder:
    def __init__(self, sizes: Dimensions, weights: Weights) -> None:
        self._sizes, self._weights = sizes, weights
        self._audio = op.parameter([-1, -1, sizes.n_text_state], np.float32, name="encoder_hidden_states")
        self._ids = op.parameter([-1, -1], np.int64, name="input_ids")
        self._beams = op.parameter([-1], np.int32, name="beam_idx")
        for node in (self._audio, self._ids, self._beams):
            name_port(node.output(0), node.get_friendly_name())
        self._batch = op.gather(op.shape_of(self._ids), i64(0), i64(0))
        self._sinks: list[Node] = []

    def build(self) -> ov.Model:
        sizes, weights, size = self._sizes, self._weights, self._sizes.n_text_state
        # The past of the first layer comes first: its length gives the positions of the new tokens.
        first_past = self._past(0, "key")
        scalar = op.constant(np.int64(0))
        past = op.gather(op.shape_of(first_past[1]), op.constant(np.int64(2)), scalar)
        length = op.gather(op.shape_of(self._ids), op.constant(np.int64(1)), scalar)
        total = op.add(past, length)
        positions = op.range(past, total, op.constant(np.int64(1)), output_type="i64")
        rows = op.tile(op.unsqueeze(positions, scalar), op.concat([self._batch, i64(1)], 0))
        words = op.constant(weights("decoder.token_embedding.weight", sizes.n_vocab, size))
        places = op.constant(weights("decoder.positional_embedding", sizes.n_text_ctx, size))
        x = op.add(op.gather(words, self._ids, scalar), op.gather(places, rows, scalar))
        mask = self._mask(total, positions)
        for layer in range(sizes.n_text_layer):
            pasts = (first_past if layer == 0 else self._past(layer, "key"), self._past(layer, "value"))
            x = self._block(layer, x, mask, pasts)
        hidden = _norm(weights, "decoder.ln", x, size)
        logits = op.matmul(hidden, words, False, True)
        name_port(logits.output(0), "logits")
        return ov.Model([op.result(logits)], self._sinks, [self._audio, self._ids, self._beams], "whisper_decoder")

    def _mask(self, total: Node, positions: Node) -> Node:
        columns: Node = op.range(op.constant(np.int64(0)), total, op.constant(np.int64(1)), output_type="i64")
        for axis in (0, 1, 2):
            columns = op.unsqueeze(columns, op.constant(np.int64(axis)))
        rows = op.unsqueeze(positions, i64(0, 1, 3))
        visible = op.less_equal(columns, rows)
        return op.select(visible, op.constant(np.float32(0)), op.constant(_MASKED))

    def _past(self, layer: int, part: str) -> tuple[util.Variable, Node]:
        heads, size = self._sizes.n_text_head, self._sizes.n_text_state
        info = util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, size // heads])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.{layer}.decoder.{part}present.{layer}.decoder.{part}"
        variable = util.Variable(info)
        shape = op.concat([self._batch, i64(heads), i64(0), i64(size // heads)], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        return variable, op.gather(op.read_value(empty, variable), self._beams, op.constant(np.int64(0)))

    def _extend(self, past: tuple[util.Variable, Node], new: Node) -> Node:
        variable, kept = past
        joined = op.concat([kept, new], 2)
        self._sinks.append(op.assign(joined, variable))
        return joined

    def _block(self, layer: int, x: Node, mask: Node, pasts: tuple[tuple[util.Variable, Node], ...]) -> Node:
        weights, size, heads = self._weights, self._sizes.n_text_state, self._sizes.n_text_head
        block = f"decoder.blocks.{layer}"
        normal = _norm(weights, f"{block}.attn_ln", x, size)
        query, key, value = (
            split_heads(linear(weights, f"{block}.attn.{part}", normal, size, size, bias=part != "key"), heads, size)
            for part in ("query", "key", "value")
        )
        keys, values = self._extend(pasts[0], key), self._extend(pasts[1], value)
        attended = op.scaled_dot_product_attention(
            query, keys, values, mask, name=f"layers.{layer}.self_attn/attention"
        )
        x = op.add(x, linear(weights, f"{block}.attn.out", merge_heads(attended, size), size, size))
        x = op.add(x, self._listen(layer, x))
        return feed_forward(weights, block, x, size)

    def _listen(self, layer: int, x: Node) -> Node:
        """Attention over the audio, whose keys and values are computed once after a reset."""
        weights, size, heads = self._weights, self._sizes.n_text_state, self._sizes.n_text_head
        name = f"decoder.blocks.{layer}.cross_attn"
        normal = _norm(weights, f"{name}_ln", x, size)
        query = split_heads(linear(weights, f"{name}.query", normal, size, size), heads, size)
        kept = []
        for part in ("key", "value"):
            computed = linear(weights, f"{name}.{part}", self._audio, size, size, bias=part != "key")
            initial = split_heads(computed, heads, size)
            initial.set_friendly_name(f"{layer}.encoder.{part}")
            info = util.VariableInfo()
            info.data_shape = ov.PartialShape([-1, heads, -1, size // heads])
            info.data_type = ov.Type.f32
            info.variable_id = f"audio.{layer}.{part}"
            variable = util.Variable(info)
            read = op.read_value(initial, variable)
            self._sinks.append(op.assign(read, variable))
            kept.append(read)
        attended = op.scaled_dot_product_attention(
            query,
            kept[0],
            kept[1],
            op.constant(np.zeros((1, 1, 1, 1), np.float32)),
            name=f"layers.{layer}.encoder_attn/attention",
        )
        return linear(weights, f"{name}.out", merge_heads(attended, size), size, size)
