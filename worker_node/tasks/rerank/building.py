"""The canary of reranking engines, which must pass before a model is ready."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from worker_node.engines.cpu_share import CpuRole
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import JobEngine
from worker_node.models.directory import InstalledModel
from worker_node.serving.encoders import EncoderTask, known_that_fit
from worker_node.serving.task import ModelParts, Shapes
from worker_node.settings import ModelSettings
from worker_node.tasks.rerank.conversion import RerankCanary, read_rerank_canary
from worker_node.tasks.rerank.messages import Scored, rerank_job
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.prompt import PromptedTokenizer, RerankPrompt, read_prompt
from worker_node.tasks.rerank.service import RerankModel
from worker_node.tasks.rerank.tokenizer import PairTokenizer


def rerank_canary(known: RerankCanary, tokenizer: PairTokenizer) -> Canary:
    """Return the check that the engine's logits of known pairs are what the CPU gave, within a tolerance."""
    expected = np.asarray(known.logits, np.float32)

    async def check(engine: JobEngine) -> None:
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


# How reranking models are built, planned and admitted.

# Each static shape has its copy of the weights, and a decoder's are large.
_DECODER_BUCKETS = (512,)


class _Rerank(EncoderTask):
    cpu_role = CpuRole.YIELDS

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
            places = known_that_fit([known.length(*pair) for pair in answers.pairs], limit, parts.wanted)
            pairs = tuple(answers.pairs[place] for place in places)
            logits = tuple(answers.logits[place] for place in places)
            return rerank_canary(replace(answers, pairs=pairs, logits=logits), known)

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
