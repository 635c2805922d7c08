"""How reranking models are opened, and the canary that an engine must pass before it is ready."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker_node.engines.process import Canary
from worker_node.models.directory import InstalledModel, read_canary
from worker_node.serving.encoders import EncoderTask, Floats, known_answers_canary, known_that_fit
from worker_node.serving.task import EnginePlan
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.rerank.canary import RerankCanary
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.service import RerankModel, pair_job
from worker_node.tasks.rerank.tokenizer import Pair, PairTokenizer


def rerank_canary(pairs: Sequence[Pair], logits: Sequence[Sequence[float]], tolerance: float) -> Canary:
    """The check that the engine's logits of known pairs are what the CPU gave, within a tolerance."""
    expected = np.asarray(logits, np.float32)

    def fault(found: Floats) -> str | None:
        worst = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())
        if worst > tolerance:
            return f"a logit is {worst:.4f} from the known one, at most {tolerance:.4f} is right"
        return None

    return known_answers_canary(lambda deadline: pair_job(pairs, deadline), expected.shape, fault)


class _Rerank(EncoderTask[RerankModel]):
    yields_to_chats = True

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> RerankModel:  # noqa: ARG002
        tokenizer = PairTokenizer(installed.path, installed.context_limit)
        return RerankModel(installed, tokenizer, wanted.of(RerankOptions).documents_limit)

    def canary(self, model: RerankModel, wanted: ModelSettings, plan: EnginePlan) -> Canary:
        known = read_canary(model.installed.path, RerankCanary)
        pairs = [model.tokenizer.pair(*texts) for texts in known.pairs]
        fitting = known_that_fit([len(pair.ids) for pair in pairs], plan.prompt_limit, wanted)
        return rerank_canary([pairs[i] for i in fitting], [known.logits[i] for i in fitting], known.tolerance)


SERVING = _Rerank()
