"""Queries and documents to pairs of token ids, counted exactly; only documents are ever cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from worker_node.core.errors import ContextLengthExceeded
from worker_node.serving.tokenizing import (
    CHARACTERS_A_TOKEN,
    CHARACTERS_AT_ONCE,
    COUNTED_CHARACTERS,
    beginning,
    load_tokenizer,
    never_abandoned,
    tokenize,
)

# Encodings hold much more than ids: those of a large request are not all kept.
_BATCH = 64


class Pair(NamedTuple):
    """A query and a document as token ids, special ones included; the first `query` of them are of token type 0."""

    ids: list[int]
    query: int


class PairTokenizer:
    """The tokenizer of a model that takes pairs of at most `limit` tokens; `whole` is the one of single texts."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit = limit
        self.whole = load_tokenizer(directory)

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
        """Return the pair of the query with each document, special tokens included.

        A document is cut at its end to `max_document_tokens`, and, with `truncate`, to what the limit leaves it beside
        the query. Raises ContextLengthExceeded, naming the document as one of `field`, for a pair that is still too
        long, and for a query that leaves no room for a document. `deadline` is monotonic seconds: raises
        DeadlineExceeded, and Overloaded when too much text waits.
        """

        def work(go_on: Callable[[], None]) -> list[Pair]:
            return self._encode(query, documents, truncate, max_document_tokens, field, go_on)

        return await tokenize(work, len(query) + sum(map(len, documents)), deadline)

    def pair(self, query: str, document: str) -> Pair:
        """A short pair; a document that is too long is cut."""
        return self._encode(query, [document], True, None, "documents", never_abandoned)[0]

    def _encode(
        self,
        query: str,
        documents: Sequence[str],
        truncate: bool,
        most: int | None,
        field: str,
        go_on: Callable[[], None],
    ) -> list[Pair]:
        # Once: a long query would be tokenized again for each document.
        asked = beginning(self.whole, query, self.limit, COUNTED_CHARACTERS, go_on)
        question = self.whole.encode_batch_fast([asked], add_special_tokens=False)[0]
        fixed = len(question) + self.whole.num_special_tokens_to_add(is_pair=True)
        if fixed >= self.limit:
            raise self._no_room(str(fixed) if asked is query else f"more than {self.limit}")
        wanted = self.limit if most is None else min(most, self.limit)
        cut = truncate or (most is not None and most <= self.limit)
        first = CHARACTERS_A_TOKEN * wanted if cut else COUNTED_CHARACTERS
        pairs: list[Pair] = []
        some: list[str] = []
        for place, document in enumerate(documents):
            kept = beginning(self.whole, document, wanted, first, go_on)
            if kept is not document and not cut:
                raise self._too_long(f"{field}[{place}]", f"more than {self.limit} tokens")
            some.append(kept)
            if place + 1 == len(documents) or sum(map(len, some)) > CHARACTERS_AT_ONCE or len(some) == _BATCH:
                for encoding in self.whole.encode_batch_fast(some, add_special_tokens=False):
                    if cut:
                        encoding.truncate(min(wanted, self.limit - fixed) if truncate else wanted)
                    if fixed + len(encoding) > self.limit:
                        tokens = f"{len(encoding)} tokens, {fixed + len(encoding)} with the query"
                        raise self._too_long(f"{field}[{len(pairs)}]", tokens)
                    pair = self.whole.post_process(question, encoding)
                    pairs.append(Pair(pair.ids, (*pair.type_ids, 1).index(1)))
                go_on()
                some = []
        return pairs

    def _too_long(self, where: str, tokens: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"{where} has {tokens}, and the model takes at most {self.limit}; shorten it or send truncate: true",
            param=where,
        )

    def _no_room(self, count: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the query takes {count} of the model's {self.limit} tokens and leaves no room for a document; shorten it",
            param="query",
        )
