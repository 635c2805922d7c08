"""Queries and documents in the prompt of a decoder that ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from worker_node.tasks.rerank.files.prompt import RerankPrompt
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer


class PromptedTokenizer(PairTokenizer):
    """As `PairTokenizer`, for a model with a prompt. What texts say of special tokens is text."""

    def __init__(self, directory: Path, limit: int, prompt: RerankPrompt) -> None:
        super().__init__(directory, limit)
        self._tokenizer.encode_special_tokens = True
        self._prompt = prompt

    def texts(self, query: str, documents: Sequence[str]) -> tuple[str, Sequence[str]]:
        """See `PairTokenizer.texts`; the prompt's tokens count as the query's."""
        return self._prompt.of_query(query), [self._prompt.of_document(document) for document in documents]
