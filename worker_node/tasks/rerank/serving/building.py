"""How reranking models are built, planned and admitted."""

from __future__ import annotations

from worker_node.serving.encoders import EncoderTask
from worker_node.serving.task import ModelParts
from worker_node.tasks.rerank.files.canary import read_rerank_canary
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.serving.canary import rerank_canary
from worker_node.tasks.rerank.serving.model import RerankModel
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer


class _Rerank(EncoderTask):
    def build(self, parts: ModelParts) -> RerankModel:
        installed = parts.installed
        tokenizer = PairTokenizer(installed.path, installed.context_limit)
        return RerankModel(
            installed,
            parts.place(rerank_canary(read_rerank_canary(installed.path), tokenizer)),
            tokenizer,
            parts.wanted.of(RerankOptions).documents_limit,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )


SERVING = _Rerank()
