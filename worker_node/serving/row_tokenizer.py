"""Tokenizes texts and pairs of texts for encoders; large ones in threads, since these tokenizers release the GIL.

Eight megabytes of text are four million tokens, and gigabytes of encodings: a text is read from its beginning, only
until it is known to be too long, and only while a caller waits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import tokenizers

from worker_node.core.errors import BadRequest, ContextLengthExceeded, DeadlineExceeded, Overloaded

R = TypeVar("R")

# Tokenizing about this many characters takes a millisecond: more goes to a thread, so that the event loop stays free.
INLINE_CHARACTERS = 8_000
# What a text costs beside its characters, in characters.
_COST_OF_A_TEXT = 80
# Ordinary text has four to five characters a token.
CHARACTERS_A_TOKEN = 16
# The tokens of a text up to this long are counted exactly, even where it is much too long.
COUNTED_CHARACTERS = 64_000
# What is tokenized between two looks at whether someone still waits; encodings of no more are in memory at once.
CHARACTERS_AT_ONCE = 256_000
# Of requests that wait for a thread, and those in one.
MAX_CHARACTERS = 64_000_000
# A text with too few tokens in this many characters is refused: reading on would cost seconds and much memory.
MAX_LOOKED_AT = 1_000_000
# Where a text is cut its last tokens may be others than in the whole text: this many more must follow. WordPiece makes
# one token of a word of more than 100 characters, and up to 100 of its first 100.
_MARGIN = 128
_GROWTH = 4


class Abandoned(Exception):
    """The caller no longer waits for the result."""


def never_abandoned() -> None:
    """For work that is too small to be interrupted."""


class TokenizingThreads:
    """A thread for large requests and one for very large ones, so that each delays only requests of its own size."""

    def __init__(self, *, max_characters: int = MAX_CHARACTERS) -> None:
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._very_large = ThreadPoolExecutor(1, thread_name_prefix="tokenize-very-large")
        self._most = max_characters
        self._characters = 0

    async def run(self, work: Callable[[Callable[[], None]], R], characters: int, deadline: float) -> R:
        """Run `work` in a thread; it gets a function to call now and then, which raises when nobody waits any more.

        `characters` is how many it is about, `deadline` monotonic seconds. Raises Overloaded, DeadlineExceeded.
        """
        if self._characters and self._characters + characters > self._most:
            raise Overloaded(f"{self._characters} characters wait to be tokenized; the bound here is {self._most}")
        if deadline <= time.monotonic():
            raise DeadlineExceeded("the deadline passed before the texts were tokenized")
        left = threading.Event()

        def go_on() -> None:
            if left.is_set():
                raise Abandoned

        self._characters += characters
        thread = self._large if characters <= CHARACTERS_AT_ONCE else self._very_large
        working = asyncio.get_running_loop().run_in_executor(thread, work, go_on)
        working.add_done_callback(lambda ended: self._ended(ended, characters))
        try:
            done, _ = await asyncio.wait([working], timeout=max(0.0, min(deadline - time.monotonic(), _FOREVER_S)))
        finally:
            left.set()
        if done:
            return working.result()
        working.cancel()  # if it has not begun
        raise DeadlineExceeded("the deadline passed while the texts were tokenized")

    def _ended(self, working: asyncio.Future[R], characters: int) -> None:
        self._characters -= characters
        if not working.cancelled():
            working.exception()  # the caller may have left: nothing is logged


_FOREVER_S = 86_400.0
# Those of the node: encoders of every task share them.
THREADS = TokenizingThreads()


async def tokenize(work: Callable[[Callable[[], None]], R], characters: int, deadline: float) -> R:
    """Run `work` in `THREADS`, or at once if it is small; see `TokenizingThreads.run`."""
    if characters <= INLINE_CHARACTERS:
        return work(never_abandoned)
    return await THREADS.run(work, characters, deadline)


async def text_ids(
    tokenizer: tokenizers.Tokenizer, text: str, limit: int, *, special: bool, deadline: float
) -> list[int]:
    """The token ids of one text. Raises ContextLengthExceeded for more than `limit`, and as `TokenizingThreads.run`."""

    def work(go_on: Callable[[], None]) -> list[int]:
        kept = beginning(tokenizer, text, limit, COUNTED_CHARACTERS, go_on)
        encoding = tokenizer.encode_batch_fast([kept], add_special_tokens=special)[0]
        # The length first: the ids of a text that is too long are many numbers to make.
        if (count := len(encoding)) > limit:
            at_least = "more than " if len(kept) < len(text) else ""
            raise ContextLengthExceeded(
                f"the text has {at_least}{count} tokens and the model takes at most {limit}; shorten it",
                param="prompt",
                tokens=count,
                limit=limit,
            )
        return encoding.ids

    return await tokenize(work, len(text), deadline)


def beginning(
    tokenizer: tokenizers.Tokenizer, text: str, tokens: int, first: int, go_on: Callable[[], None] = never_abandoned
) -> str:
    """Return the text, or a beginning of it that has more than `tokens` tokens and begins with the same ones.

    `first` is how many characters are tried first; a text that is not longer is returned as it is. Raises BadRequest
    for a longer one whose first `MAX_LOOKED_AT` characters have fewer tokens.
    """
    size = first
    while size < len(text):
        go_on()
        size = min(size, MAX_LOOKED_AT)
        # No word is cut if there is a space in the second half.
        space = max(text.rfind(" ", size // 2, size), text.rfind("\n", size // 2, size))
        end = size if space < 0 else space
        encoding = tokenizer.encode_batch_fast([text[:end]], add_special_tokens=False)[0]
        if len(encoding) > tokens + _MARGIN:
            return text[:end]
        if size == MAX_LOOKED_AT:
            raise BadRequest(
                f"the first {MAX_LOOKED_AT} characters of a text of {len(text)} have only {len(encoding)} tokens: "
                "remove white space and other characters that are not text"
            )
        size *= _GROWTH

    return text


def check_ids(ids: Sequence[int], vocabulary: int, param: str | None = None) -> None:
    """Raise BadRequest unless there is at least one token id and each is one of the vocabulary's."""
    if not ids:
        raise BadRequest("a list of token ids is empty", param=param)
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise BadRequest(
            f"a token id is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer", param=param
        )


class Pair(NamedTuple):
    """Two texts as token ids, special ones included; the first `query` of them are of token type 0."""

    ids: list[int]
    query: int


def _cost(texts: Sequence[str]) -> int:
    """As how many characters of one text these texts count."""
    return sum(map(len, texts)) + _COST_OF_A_TEXT * len(texts)


# Encodings hold much more than ids: those of a large request are not all kept.
_TEXTS_AT_ONCE = 64


class RowTokenizer:
    """Texts and pairs to rows of at most `limit` token ids; `whole` is the tokenizer, which cuts nothing."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit = limit
        # It releases the GIL.
        self.whole = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.whole.no_truncation()
        self.whole.no_padding()

    async def encode(
        self, texts: Sequence[str | tuple[int, ...]], *, truncate: bool, deadline: float = math.inf
    ) -> list[list[int]]:
        """Return the token ids of each text; all may be token ids already, which are used unchanged.

        A longer text is cut at its end if `truncate`, else ContextLengthExceeded names it and its length. `deadline` is
        monotonic seconds. Raises BadRequest for ids outside of the vocabulary, Overloaded, DeadlineExceeded.
        """
        words = [text for text in texts if isinstance(text, str)]
        if len(words) < len(texts):
            return [self._given(ids, place, truncate) for place, ids in enumerate(texts) if not isinstance(ids, str)]
        work = partial(self.rows, words, truncate)
        return await tokenize(work, _cost(words), deadline)

    def rows(
        self, texts: Sequence[str], truncate: bool, go_on: Callable[[], None] = never_abandoned
    ) -> list[list[int]]:
        return [row.ids for row in self._encodings(texts, go_on, truncate=truncate)]

    async def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool,
        max_document_tokens: int | None = None,
        field: str = "documents",
        deadline: float = math.inf,
    ) -> list[Pair]:
        """Return the pair of the query with each document.

        A document is cut at its end to `max_document_tokens`, and, with `truncate`, to what the limit leaves it beside
        the query. Raises ContextLengthExceeded, naming the document as one of `field`, for a pair that is still too
        long, and for a query that leaves no room for a document; else as `encode`.
        """
        work = partial(self.pairs, query, documents, truncate, max_document_tokens, field)
        return await tokenize(work, len(query) + _cost(documents), deadline)

    def pairs(
        self,
        query: str,
        documents: Sequence[str],
        truncate: bool,
        most: int | None = None,
        field: str = "documents",
        go_on: Callable[[], None] = never_abandoned,
    ) -> list[Pair]:
        asked = beginning(self.whole, query, self.limit, COUNTED_CHARACTERS, go_on)

        # Once: a long query would be tokenized again for each document.
        question = self.whole.encode_batch_fast([asked], add_special_tokens=False)[0]
        fixed = len(question) + self.whole.num_special_tokens_to_add(is_pair=True)
        if fixed >= self.limit:
            count = str(fixed) if asked is query else f"more than {self.limit}"
            raise ContextLengthExceeded(
                f"the query takes {count} of the model's {self.limit} tokens and leaves no room for a document; "
                "shorten it",
                param="query",
            )

        encodings = self._encodings(documents, go_on, truncate=truncate, most=most, field=field, question=question)
        return [Pair(pair.ids, (*pair.type_ids, 1).index(1)) for pair in encodings]

    def _given(self, ids: tuple[int, ...], place: int, truncate: bool) -> list[int]:
        check_ids(ids, self.whole.get_vocab_size(with_added_tokens=True))
        if len(ids) > self.limit and not truncate:
            raise self._too_long(f"texts[{place}]", f"{len(ids)} tokens")
        return list(ids[: self.limit])

    def _encodings(
        self,
        texts: Sequence[str],
        go_on: Callable[[], None],
        *,
        truncate: bool,
        most: int | None = None,
        field: str = "texts",
        question: tokenizers.Encoding | None = None,
    ) -> Iterator[tokenizers.Encoding]:
        """The row of each text, after the `question` where there is one; `most` tokens are kept of each text."""
        fixed = self.whole.num_special_tokens_to_add(is_pair=question is not None)
        fixed += 0 if question is None else len(question)
        wanted = self.limit if most is None else min(most, self.limit)
        cut = truncate or (most is not None and most <= self.limit)
        kept_tokens = min(wanted, self.limit - fixed) if truncate else wanted
        first = CHARACTERS_A_TOKEN * wanted if cut else COUNTED_CHARACTERS
        some: list[str] = []
        for place, text in enumerate(texts):
            kept = beginning(self.whole, text, wanted, first, go_on)
            if kept is not text and not cut:
                raise self._too_long(f"{field}[{place}]", f"more than {self.limit} tokens")
            some.append(kept)
            last = place + 1 == len(texts)
            if not last and len(some) < _TEXTS_AT_ONCE and sum(map(len, some)) <= CHARACTERS_AT_ONCE:
                continue
            encodings = self.whole.encode_batch_fast(some, add_special_tokens=False)
            for number, encoding in enumerate(encodings, place + 1 - len(some)):
                if cut:
                    encoding.truncate(kept_tokens)
                # The length first: the ids of a text that is too long are many numbers to make.
                if (total := fixed + len(encoding)) > self.limit:
                    tokens = (
                        f"{total} tokens" if question is None else f"{len(encoding)} tokens, {total} with the query"
                    )
                    raise self._too_long(f"{field}[{number}]", tokens)
                parts = (encoding,) if question is None else (question, encoding)
                yield self.whole.post_process(*parts)
            go_on()
            some = []

    def _too_long(self, where: str, tokens: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"{where} has {tokens}, and the model takes at most {self.limit}; shorten it or send truncate: true",
            param=where,
        )
