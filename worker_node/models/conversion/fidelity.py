"""Measures how near compressed weights are to the exact ones, by what they predict rather than by eye."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from worker_node.models.manifest import Fidelity, VectorFidelity

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
