"""Texts to the token ids of an embedding model, counted exactly; a text is cut only on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from worker_node.core.errors import ContextLengthExceeded
from worker_node.serving.tokenizing import (
    CHARACTERS_A_TOKEN,
    CHARACTERS_AT_ONCE,
    COUNTED_CHARACTERS,
    beginning,
    check_ids,
    load_tokenizer,
    tokenize,
)


class EmbeddingTokenizer:
    """The tokenizer of a model that takes at most `limit` tokens; `whole` is the one that cuts nothing."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit = limit
        self.whole, self._cut = load_tokenizer(directory), load_tokenizer(directory)
        self._cut.enable_truncation(limit)

    async def encode(
        self, texts: Sequence[str | tuple[int, ...]], *, truncate: bool, deadline: float = math.inf
    ) -> list[list[int]]:
        """Return the token ids of each text, with the model's special tokens; token ids are used unchanged.

        A text of more than `limit` tokens is cut if `truncate`, else ContextLengthExceeded names it and its length.
        `deadline` is monotonic seconds. Raises BadRequest for token ids outside of the model's vocabulary, Overloaded,
        DeadlineExceeded.
        """
        characters = sum(len(text) for text in texts if isinstance(text, str))
        return await tokenize(lambda go_on: self._encode(texts, truncate, go_on), characters, deadline)

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of a few short texts, special ones included."""
        return [encoding.ids for encoding in self.whole.encode_batch_fast(list(texts))]

    def _encode(
        self, texts: Sequence[str | tuple[int, ...]], truncate: bool, go_on: Callable[[], None]
    ) -> list[list[int]]:
        rows: list[list[int]] = [[]] * len(texts)
        words: list[str] = []
        places: list[int] = []
        waiting = 0
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                rows[place] = self._given(text, truncate)
                self._check_length(len(rows[place]), place)
                continue
            kept = self._enough(text, truncate, place, go_on)
            words.append(kept)
            places.append(place)
            waiting += len(kept)
            if waiting > CHARACTERS_AT_ONCE:
                self._encode_words(words, places, rows, truncate)
                go_on()
                words, places, waiting = [], [], 0
        self._encode_words(words, places, rows, truncate)
        return rows

    def _enough(self, text: str, truncate: bool, place: int, go_on: Callable[[], None]) -> str:
        """The text, or the beginning of it that counts. Raises ContextLengthExceeded."""
        if truncate:
            return beginning(self.whole, text, self.limit, CHARACTERS_A_TOKEN * self.limit, go_on)
        kept = beginning(self.whole, text, self.limit, COUNTED_CHARACTERS, go_on)
        if len(kept) < len(text):
            raise self._too_long(f"more than {self.limit}", place)
        return text

    def _encode_words(self, words: list[str], places: list[int], rows: list[list[int]], truncate: bool) -> None:
        tokenizer = self._cut if truncate else self.whole
        for place, encoding in zip(places, tokenizer.encode_batch_fast(words), strict=True):
            # The length first: the ids of a text that is too long are many numbers to make.
            self._check_length(len(encoding), place)
            rows[place] = encoding.ids

    def _check_length(self, count: int, place: int) -> None:
        if count > self.limit:
            raise self._too_long(str(count), place)

    def _too_long(self, count: str, place: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"text {place} has {count} tokens and the model takes at most {self.limit}; "
            "shorten it or send truncate: true",
            param=f"texts[{place}]",
        )

    def _given(self, ids: tuple[int, ...], truncate: bool) -> list[int]:
        check_ids(ids, self.whole.get_vocab_size(with_added_tokens=True))
        return list(ids[: self.limit] if truncate else ids)
