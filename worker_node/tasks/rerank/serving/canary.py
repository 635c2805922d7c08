"""The canary of reranking engines, which must pass before a model is ready."""

from __future__ import annotations

import time
from contextlib import aclosing

import numpy as np

from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import Engine
from worker_node.tasks.rerank.files.canary import RerankCanary
from worker_node.tasks.rerank.messages import Scored, rerank_job
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer


def rerank_canary(known: RerankCanary, tokenizer: PairTokenizer) -> Canary:
    """Return the check that the engine's logits of known pairs are what the CPU gave, within a tolerance."""
    expected = np.asarray(known.logits, np.float32)

    async def check(engine: Engine) -> None:
        pairs = [(await tokenizer.encode(query, [document], truncate=True))[0] for query, document in known.pairs]
        job = rerank_job(pairs, time.monotonic() + CANARY_TIMEOUT_S)
        async with aclosing(engine.run(job, Scored)) as results:
            found = (await anext(results)).rows(len(pairs))
        if found.shape != expected.shape:
            raise CanaryFailed(f"logits of shape {found.shape}, not {expected.shape}")
        worst = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())
        if worst > known.tolerance:
            raise CanaryFailed(f"a logit is {worst:.4f} from the known one, at most {known.tolerance:.4f} is right")

    return check
