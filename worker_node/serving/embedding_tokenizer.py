"""Texts to the token ids of an embedding model, counted exactly and never cut in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from worker_node.errors import ContextLengthExceeded
from worker_node.serving.vocabulary import check_ids

# Tokenizing about this many characters takes a millisecond: more goes to a thread, so that the event loop stays free.
INLINE_CHARACTERS = 8_000
# Of its own, so that large requests hold up one another and nothing else that the node does in threads.
THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


class EmbeddingTokenizer:
    """A `tokenizers` tokenizer (releases the GIL) and the model's limit in tokens."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit = limit
        self._whole = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._whole.no_truncation()
        self._whole.no_padding()
        self._cut = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._cut.no_padding()
        self._cut.enable_truncation(limit)

    async def encode(self, texts: Sequence[str | tuple[int, ...]], *, truncate: bool) -> list[list[int]]:
        """Return the token ids of each text, with the model's special tokens; token ids are taken as they stand.

        A text of more than `limit` tokens is cut if `truncate`, else ContextLengthExceeded names it and its length.
        Raises BadRequest for token ids that are none of the model's.
        """
        tokenizer = self._cut if truncate else self._whole
        words = [text for text in texts if isinstance(text, str)]
        if sum(map(len, words)) <= INLINE_CHARACTERS:
            encodings = tokenizer.encode_batch_fast(words)
        else:
            encodings = await asyncio.get_running_loop().run_in_executor(THREADS, tokenizer.encode_batch_fast, words)
        encoded = iter(encodings)
        rows: list[list[int]] = []
        for index, text in enumerate(texts):
            row = next(encoded) if isinstance(text, str) else self._given(text, truncate)
            # The length first: the ids of a text of megabytes are millions of numbers to make.
            if len(row) > self.limit:
                raise ContextLengthExceeded(
                    f"text {index} has {len(row)} tokens and the model takes at most {self.limit}; "
                    "shorten it or send truncate: true",
                    param=f"texts[{index}]",
                )
            rows.append(row if isinstance(row, list) else row.ids)
        return rows

    def _given(self, ids: tuple[int, ...], truncate: bool) -> list[int]:
        check_ids(ids, self._whole.get_vocab_size(with_added_tokens=True))
        return list(ids[: self.limit] if truncate else ids)
