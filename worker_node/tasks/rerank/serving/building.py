"""How reranking models are built, planned and admitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker_node.engines.cpu_share import CpuRole
from worker_node.engines.process import Canary
from worker_node.models.manifest import InstalledModel
from worker_node.serving.encoders import EncoderTask, known_that_fit
from worker_node.serving.task import ModelParts, Shapes
from worker_node.settings import ModelSettings
from worker_node.tasks.rerank.files.canary import read_rerank_canary
from worker_node.tasks.rerank.files.prompt import RerankPrompt, read_prompt
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.serving.canary import rerank_canary
from worker_node.tasks.rerank.serving.model import RerankModel
from worker_node.tasks.rerank.serving.prompted import PromptedTokenizer
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer

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
