"""Queries and documents to pairs of token ids, counted exactly; only documents are ever cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from worker_node.errors import ContextLengthExceeded
from worker_node.serving.embedding_tokenizer import INLINE_CHARACTERS, THREADS
from worker_node.tasks.rerank.messages import Pair


class PairTokenizer:
    """A `tokenizers` tokenizer (releases the GIL) and the model's limit in tokens of a pair."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit = limit
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    async def encode(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool,
        max_document_tokens: int | None = None,
        field: str = "documents",
    ) -> list[Pair]:
        """Return the pair of the query with each document, special tokens included.

        A document is cut at its end to `max_document_tokens`, and, with `truncate`, to what the limit leaves it beside
        the query. Raises ContextLengthExceeded, naming the document as one of `field`, for a pair that is too long all
        the same, and for a query that leaves no room for a document.
        """
        if len(documents) * len(query) + sum(map(len, documents)) <= INLINE_CHARACTERS:
            return self._encode(query, documents, truncate, max_document_tokens, field)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(THREADS, self._encode, query, documents, truncate, max_document_tokens, field)

    def _encode(self, query: str, documents: Sequence[str], truncate: bool, most: int | None, field: str) -> list[Pair]:
        # By itself first: a query that is too long would be tokenized once for each document.
        if (count := len(self._tokenizer.encode_batch_fast([query])[0])) >= self.limit:
            raise self._no_room(count)
        pairs = []
        for start in range(0, len(documents), _AT_ONCE):
            some = documents[start : start + _AT_ONCE]
            encodings = self._tokenizer.encode_batch_fast([(query, document) for document in some])
            pairs += [
                self._pair(encoding, f"{field}[{start + place}]", truncate, most)
                for place, encoding in enumerate(encodings)
            ]
        return pairs

    def _no_room(self, count: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the query takes {count} of the model's {self.limit} tokens and leaves no room for a document; shorten it",
            param="query",
        )

    def _pair(self, encoding: tokenizers.Encoding, where: str, truncate: bool, most: int | None) -> Pair:
        ids, sequences = encoding.ids, encoding.sequence_ids
        begin = next((place for place, which in enumerate(sequences) if which == 1), len(ids))
        length = sum(which == 1 for which in sequences)
        fixed = len(ids) - length
        kept = length if most is None else min(length, most)
        if fixed >= self.limit:
            raise self._no_room(fixed)
        if truncate:
            kept = min(kept, self.limit - fixed)
        if fixed + kept > self.limit:
            raise ContextLengthExceeded(
                f"{where} has {kept} tokens, {fixed + kept} with the query, and the model takes at most "
                f"{self.limit}; shorten it or send truncate: true",
                param=where,
            )
        types = encoding.type_ids
        cut = [*ids[: begin + kept], *ids[begin + length :]]
        return Pair(cut, next((place for place, kind in enumerate(types) if kind == 1), len(cut)))


# Encodings hold much more than ids: those of a large request are not all kept.
_AT_ONCE = 64
