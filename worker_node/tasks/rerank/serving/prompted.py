"""Queries and documents in the prompt of a decoder that ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from worker_node.tasks.rerank.files.prompt import RerankPrompt
from worker_node.tasks.rerank.messages import Pair
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer


class PromptedTokenizer(PairTokenizer):
    """As `PairTokenizer`, for a model with a prompt. What texts say of special tokens is text."""

    def __init__(self, directory: Path, limit: int, prompt: RerankPrompt) -> None:
        super().__init__(directory, limit)
        self._tokenizer.encode_special_tokens = True
        self._prompt = prompt

    def length(self, query: str, document: str) -> int:
        """See `PairTokenizer.length`."""
        return super().length(self._prompt.of_query(query), self._prompt.of_document(document))

    async def encode(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool,
        max_document_tokens: int | None = None,
        field: str = "documents",
        deadline: float = math.inf,
    ) -> list[Pair]:
        """See `PairTokenizer.encode`; the prompt's tokens count as the query's."""
        return await super().encode(
            self._prompt.of_query(query),
            [self._prompt.of_document(document) for document in documents],
            truncate=truncate,
            max_document_tokens=max_document_tokens,
            field=field,
            deadline=deadline,
        )
