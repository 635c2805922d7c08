"""How reranking models are built, planned and admitted, and the canary that an engine must pass before it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker_node.engines.process import Canary
from worker_node.models.directory import InstalledModel
from worker_node.serving.encoders import EncoderTask, Floats, known_answers_canary, known_that_fit
from worker_node.serving.task import ModelParts, Shapes
from worker_node.settings import ModelSettings
from worker_node.tasks.rerank.canary import read_rerank_canary
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.prompt import PromptedTokenizer, RerankPrompt, read_prompt
from worker_node.tasks.rerank.service import RerankModel, pair_job
from worker_node.tasks.rerank.tokenizer import Pair, PairTokenizer

# Each static shape has its copy of the weights, and a decoder's are large.
_DECODER_BUCKETS = (512,)


def rerank_canary(pairs: Sequence[Pair], logits: Sequence[Sequence[float]], tolerance: float) -> Canary:
    """The check that the engine's logits of known pairs are what the CPU gave, within a tolerance."""
    expected = np.asarray(logits, np.float32)

    def fault(found: Floats) -> str | None:
        worst = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())
        if worst > tolerance:
            return f"a logit is {worst:.4f} from the known one, at most {tolerance:.4f} is right"
        return None

    return known_answers_canary(lambda deadline: pair_job(pairs, deadline), expected.shape, fault)


class _Rerank(EncoderTask):
    yields_to_chats = True

    def build(self, parts: ModelParts) -> RerankModel:
        installed, options = parts.installed, parts.wanted.of(RerankOptions)
        prompt = read_prompt(installed.path)
        if prompt is None and options.rerank_instruction is not None:
            raise parts.wanted.error(
                "rerank_instruction",
                "rerank_instruction is for decoders that rank; a cross-encoder reads no instruction",
            )
        known = tokenizer = _tokenizer(installed, prompt)
        if options.rerank_instruction is not None:
            # The canary's scores are those of the model's own instruction.
            tokenizer = _tokenizer(installed, RerankPrompt(options.rerank_instruction))
        answers = read_rerank_canary(installed.path)

        def canary(limit: int) -> Canary:
            pairs = [known.pair(*texts) for texts in answers.pairs]
            fitting = known_that_fit([len(pair.ids) for pair in pairs], limit, parts.wanted)
            return rerank_canary([pairs[i] for i in fitting], [answers.logits[i] for i in fitting], answers.tolerance)

        return RerankModel(
            installed,
            parts.place(canary),
            tokenizer,
            options.documents_limit,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def static_shapes(
        self, installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any], *, emulated: bool
    ) -> Shapes:
        if read_prompt(installed.path) is not None and not values.get("npu_buckets"):
            values["npu_buckets"] = tuple(min(bucket, installed.context_limit) for bucket in _DECODER_BUCKETS)
        return super().static_shapes(installed, wanted, values, emulated=emulated)


def _tokenizer(installed: InstalledModel, prompt: RerankPrompt | None) -> PairTokenizer:
    if prompt is None:
        return PairTokenizer(installed.path, installed.context_limit)
    return PromptedTokenizer(installed.path, installed.context_limit, prompt)


SERVING = _Rerank()
