"""The canary of embedding engines, which must pass before a model is ready.

A device that computes garbage raises no error (reference: openvino #38100), so the engine must embed known texts.
"""

from __future__ import annotations

import time

import numpy as np

from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import Engine
from worker_node.models.canary import EmbeddingCanary
from worker_node.tasks.embed.calls import embed
from worker_node.tasks.embed.serving.tokenizer import EmbeddingTokenizer


def embedding_canary(known: EmbeddingCanary, tokenizer: EmbeddingTokenizer) -> Canary:
    """Return the check that the engine's vectors of known texts point where the CPU's did."""
    expected = np.asarray(known.vectors, np.float32)

    async def check(engine: Engine) -> None:
        tokens = await tokenizer.encode(known.texts, truncate=False)
        output = await embed(engine, tokens, deadline=time.monotonic() + CANARY_TIMEOUT_S)
        if output.vectors.shape != expected.shape:
            raise CanaryFailed(f"vectors of shape {output.vectors.shape}, not {expected.shape}")
        norms = np.linalg.norm(output.vectors, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = np.einsum("nd,nd->n", output.vectors, expected) / norms
        worst = float(np.nan_to_num(cosines, nan=-1.0).min())
        if worst < known.min_cosine:
            raise CanaryFailed(f"cosine {worst:.4f} to the known vectors, at least {known.min_cosine} is right")

    return check
