"""What the weights of a GGUF file predict, computed from the file alone, one layer in memory at a time.

This is the measure for compressed weights. It does not use the graph that was made of the file, so it also shows when
the graph computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker_node.models.conversion.gguf_file import GgufFile

_Values = NDArray[np.float32]
# Rows of the output matrix that are dequantised at a time.
_ROWS = 8192
_MASKED = np.float32(-1e9)


def exact_logits(gguf: GgufFile, sequences: Sequence[Sequence[int]]) -> list[_Values]:
    """Logits, f32 [tokens, vocabulary], for each sequence of token ids, teacher-forced.

    For the architectures llama, qwen2 and qwen3. Peak memory is one layer and the logits.
    """
    hidden = [gguf.tensor("token_embd.weight", np.asarray(ids, dtype=np.intp)) for ids in sequences]
    for index in range(gguf.hyperparameter("block_count")):
        layer = _Layer(gguf, f"blk.{index}")
        hidden = [layer(x) for x in hidden]
    final = gguf.tensor("output_norm.weight")
    normed = np.concatenate([_norm(x, final, _epsilon(gguf)) for x in hidden])
    logits = _project(gguf, normed)
    return np.split(logits, np.cumsum([len(ids) for ids in sequences])[:-1])


def _project(gguf: GgufFile, hidden: _Values) -> _Values:
    name = "output.weight" if "output.weight" in gguf.shapes() else "token_embd.weight"
    vocabulary = gguf.shapes()[name][0]
    logits = np.empty((len(hidden), vocabulary), dtype=np.float32)
    for first in range(0, vocabulary, _ROWS):
        rows = np.arange(first, min(first + _ROWS, vocabulary), dtype=np.intp)
        logits[:, rows[0] : rows[-1] + 1] = hidden @ gguf.tensor(name, rows).T
    return logits


class _Layer:
    """One transformer block, its weights in float32."""

    def __init__(self, gguf: GgufFile, name: str) -> None:
        self._weights = {
            tensor.removeprefix(f"{name}."): gguf.tensor(tensor)
            for tensor in gguf.shapes()
            if tensor.startswith(f"{name}.")
        }
        self._epsilon = _epsilon(gguf)
        self._heads = gguf.hyperparameter("attention.head_count")
        self._kv_heads = gguf.hyperparameter("attention.head_count_kv")
        self._base = float(gguf.get(f"{gguf.architecture}.rope.freq_base") or 10000.0)

    def __call__(self, x: _Values) -> _Values:
        """The block's output for one sequence, both f32 [tokens, size]."""
        x = x + self._linear(self._attend(self._norm(x, "attn_norm")), "attn_output")
        y = self._norm(x, "ffn_norm")
        gate = self._linear(y, "ffn_gate")
        return x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(y, "ffn_up"), "ffn_down")

    def _attend(self, x: _Values) -> _Values:
        tokens = len(x)
        query = self._rotate(self._split(x, "attn_q", self._heads))
        key = self._rotate(self._split(x, "attn_k", self._kv_heads))
        value = self._split(x, "attn_v", self._kv_heads)
        repeats = self._heads // self._kv_heads
        key, value = np.repeat(key, repeats, 0), np.repeat(value, repeats, 0)
        scores = query @ key.swapaxes(1, 2) / np.float32(np.sqrt(query.shape[-1]))
        scores += np.triu(np.full((tokens, tokens), _MASKED), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: _Values = (weights / weights.sum(-1, keepdims=True)) @ value
        return mixed.swapaxes(0, 1).reshape(tokens, -1)

    def _split(self, x: _Values, name: str, heads: int) -> _Values:
        """Queries, keys or values, f32 [heads, tokens, size], normalised where the architecture does so."""
        split = self._linear(x, name).reshape(len(x), heads, -1).swapaxes(0, 1)
        weight = self._weights.get(f"{name}_norm.weight")
        return split if weight is None else _norm(split, weight, self._epsilon)

    def _rotate(self, x: _Values) -> _Values:
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[1]), self._base ** (-np.arange(half) / half)).astype(np.float32)
        cos, sin = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2)
        rotated: _Values = x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
        return rotated

    def _linear(self, x: _Values, name: str) -> _Values:
        result: _Values = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, x: _Values, name: str) -> _Values:
        return _norm(x, self._weights[f"{name}.weight"], self._epsilon)


def _norm(x: _Values, weight: _Values, epsilon: float) -> _Values:
    scaled: _Values = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(epsilon)) * weight
    return scaled


def _epsilon(gguf: GgufFile) -> float:
    return float(gguf.field(f"{gguf.architecture}.attention.layer_norm_rms_epsilon"))
