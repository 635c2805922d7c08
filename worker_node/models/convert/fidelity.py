"""What the weights of a GGUF file predict, computed from the file alone, one layer in memory at a time.

This is the measure for compressed weights. It does not use the graph that was made of the file, so it also shows when
the graph computes something else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from worker_node.models.convert.gguf import GgufFile
from worker_node.models.manifest import Fidelity, VectorFidelity

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


# Measures how near compressed weights are to the exact ones, by what they predict rather than by eye.

# Prose, facts, a dialogue, code, numbers and another language: what a small model is asked for.
PROBE_TEXTS = (
    "The capital of France is Paris. It lies on the river Seine and is home to more than two million people, and "
    "for many centuries it has been one of the most important cities of Europe for trade, science and the arts.",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky looks blue because the "
    "molecules of the air scatter short wavelengths of sunlight much more strongly than long ones.<|im_end|>\n",
    "def mean(values):\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n",
    "In 2023 revenue rose by 12% to 4.2 billion dollars, while costs fell to 3.1 billion; the board proposed a "
    "dividend of 0.85 dollars a share, payable on 15 May to all holders of record on 30 April.",
    "She put the kettle on, looked out of the window at the rain, and wondered whether anybody would come to the "
    "meeting after all. At half past six the doorbell rang.",
    "Der schnelle braune Fuchs springt über den faulen Hund, und die Katze schaut ihm dabei zu.",
)

# For encoders: sentences of many kinds and lengths, short enough for any context.
PROBE_SENTENCES = (
    *(sentence for text in PROBE_TEXTS for sentence in text.replace("\n", " ").split(". ")),
    "hello",
    "How do I reset my password?",
    "To reset your password, open the settings, choose security and follow the link in the message.",
    "The quick brown fox jumps over the lazy dog.",
    "Invoice 4711 of 3 March is overdue since ten days; please pay the amount of 129.90.",
    "SELECT name, count(*) FROM orders GROUP BY name HAVING count(*) > 10",
    "Quarterly results exceeded expectations",
    "Photosynthesis turns light into chemical energy.",
    "¿Dónde está la biblioteca?",
    "99 !!! ???",
)


def closeness(exact: NDArray[np.float32], stored: NDArray[np.float32]) -> VectorFidelity:
    """The cosines between rows of [texts, dimensions]; see `VectorFidelity`."""
    a, b = exact.astype(np.float64), stored.astype(np.float64)
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return VectorFidelity(round(float(cosines.mean()), 5), round(float(cosines.min()), 5), len(cosines))


def teacher_forced_logits(model: ov.Model, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Logits, f32 [tokens, vocabulary], that the model gives on each sequence of token ids, on the CPU in
    float32.

    Reads the raw stateful graph: no sampling, no template, nothing between the weights and the figures.
    """
    compiled = ov.Core().compile_model(
        model,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        },
    )
    request = compiled.create_infer_request()
    result = []
    for sequence in sequences:
        request.reset_state()
        ids = np.array([sequence], dtype=np.int64)
        outputs = request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        result.append(outputs["logits"][0].copy())
    return result


def compare(exact: Sequence[NDArray[np.float32]], stored: Sequence[NDArray[np.float32]]) -> Fidelity:
    """Mean divergence per token and agreement on the likeliest token; see `Fidelity`."""
    divergences, agreements = [], []
    for truth, guess in zip(exact, stored, strict=True):
        p, q = _log_softmax(truth), _log_softmax(guess)
        divergences.append((np.exp(p) * (p - q)).sum(axis=-1))
        agreements.append(truth.argmax(axis=-1) == guess.argmax(axis=-1))
    kl, top1 = np.concatenate(divergences), np.concatenate(agreements)
    return Fidelity(kl=round(float(kl.mean()), 6), top1=round(float(top1.mean()), 4), tokens=int(kl.size))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised
