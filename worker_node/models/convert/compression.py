"""Stores the weights of a model in fewer bits, bit for bit as nncf 3.4 does (`compress_weights`, symmetric modes), and
measures what is lost.

nncf itself is a test dependency, the oracle of `test_compression.py`: with scipy and scikit-learn it takes 160 MB, and
twenty seconds of CPU time for the smallest model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Input, Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.convert.gguf import GgufFile
from worker_node.models.directory import Fidelity, VectorFidelity

# The smallest group that the NPU path accepts; one scale a row ruins the answers of a 135M model.
_GROUP = 64
# Layers of GGUF models. The embedding table and the output matrix stay in int8 in every form.
_LAYERS = re.compile(r"blk\.\d+\..*")
# The matrices that bear 4 bits best: two fifths of the weights for a third of the harm (docs/models.md).
_ROBUST = re.compile(r"blk\.\d+\.ffn_(gate|up)\.weight")
# What the names of constants that take 4 bits match, by form; all others take 8.
_FOUR_BITS = {
    Quantization.INT8_SYM: re.compile(r"(?!)"),
    Quantization.INT4_SYM: _LAYERS,
    Quantization.INT4_INT8: _ROBUST,
}
# Weights that are in f32 at a time: a matrix of a large model would take gigabytes.
_WEIGHTS_AT_ONCE = 1 << 18


def compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    """The model with its weights in that form, changed in place; the names of its constants are those of GGUF tensors.

    Raises ConversionFailed when the form is not for generation models, or the rows of a matrix are not a multiple of
    the group.
    """
    if quantization is Quantization.F16:
        return model
    if quantization not in _FOUR_BITS:
        raise ConversionFailed(f"generation models are not kept in {quantization}")
    return _compress(model, quantization)


def compress_encoder(model: ov.Model) -> ov.Model:
    """The encoder with every matrix in int8, one scale a row, changed in place."""
    return _compress(model, Quantization.INT8_SYM)


def quantise(weights: NDArray[np.floating], bits: int, group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Whole numbers of `bits` bits, int8 [rows, groups, group], and what each group's are multiplied by, f32 [rows,
    groups, 1], of a matrix [rows, columns]; `columns` is a multiple of `group`.

    The number of the largest magnitude becomes the lowest level, since there is one more below zero than above it: the
    scale of a group whose largest number is positive is negative.
    """
    rows, columns = weights.shape
    numbers = np.empty((rows, columns // group, group), np.int8)
    scales = np.empty((rows, columns // group, 1), np.float32)
    levels = 1 << (bits - 1)
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        values = weights[part].astype(np.float32).reshape(-1, columns // group, group)
        lowest, highest = np.abs(values.min(axis=2, keepdims=True)), values.max(axis=2, keepdims=True)
        scale = np.where(lowest >= highest, lowest, -highest) / np.float32(levels)
        tiny = np.finfo(np.float32).eps
        scale = np.where(np.abs(scale) < tiny, tiny, scale)
        values /= scale
        numbers[part] = np.clip(np.rint(values, out=values), -levels, levels - 1, out=values)
        scales[part] = scale
    return numbers, scales


def _compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    for constant in list(_matrices(model)):
        name = constant.friendly_name
        _replace(constant, 4 if _FOUR_BITS[quantization].fullmatch(name) else 8)
    # Where nncf notes it and others look for it; `read_directory` too.
    model.set_rt_info(str(quantization), ["nncf", "weight_compression", "mode"])
    return model


def _matrices(model: ov.Model) -> Iterator[Node]:
    """The constants [rows, columns] of which rows are looked up or which are multiplied with, perhaps as f32."""
    for constant in model.get_ordered_ops():
        if constant.get_type_name() != "Constant" or len(constant.get_output_shape(0)) != 2:
            continue
        if constant.get_element_type() in {ov.Type.f16, ov.Type.f32} and any(map(_takes_rows, _readers(constant))):
            yield constant


def _readers(constant: Node) -> Iterator[Input]:
    for reader in constant.output(0).get_target_inputs():
        if reader.get_node().get_type_name() == "Convert":
            yield from reader.get_node().output(0).get_target_inputs()
        else:
            yield reader


def _takes_rows(reader: Input) -> bool:
    node, port = reader.get_node(), reader.get_index()
    if node.get_type_name() == "Gather":
        return int(port) == 0
    return node.get_type_name() == "MatMul" and int(port) == 1 and bool(node.get_attributes()["transpose_b"])


def _replace(constant: Node, bits: int) -> None:
    """Let all that read the constant read its compressed form."""
    name, (rows, columns) = constant.friendly_name, tuple(constant.get_output_shape(0))
    group = columns if bits == 8 else _GROUP
    if columns % group:
        raise ConversionFailed(
            f"{name} has rows of {columns} weights, no multiple of the {group} that share a scale in 4 bits; "
            f"choose {Quantization.INT8_SYM}"
        )
    numbers, scales = quantise(constant.data, bits, group)
    if bits == 8:
        stored, scale = op.constant(numbers.reshape(rows, columns)), scales.reshape(rows, 1)
    else:
        # Two to a byte, the first in the lower half.
        halves = numbers.reshape(-1, 2).view(np.uint8)
        packed = ov.Tensor(ov.Type.i4, numbers.shape)
        packed.data.reshape(-1).view(np.uint8)[:] = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        stored, scale = op.constant(packed, shared_memory=True), scales
    stored.friendly_name = name
    factor = op.constant(scale.astype(np.float16), name=f"{name}/scale")
    weights = op.multiply(op.convert(stored, "f16"), factor, name=f"{name}/fq_weights_1")
    if bits == 4:
        weights = op.reshape(weights, np.array([rows, columns], dtype=np.int64), special_zero=False)
    kind = constant.get_element_type()
    for reader in constant.output(0).get_target_inputs():
        direct = reader.get_node().get_type_name() != "Convert"
        widened = direct and kind != ov.Type.f16
        source = op.convert(weights, "f32", name=f"{name}/fq_weights_1/convert") if widened else weights
        reader.replace_source_output(source.output(0))


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
