"""Token ids to text while the tokens still arrive: pure, one instance per generation.

A character may span several tokens, and a stop sequence may span several pieces of text; what is not yet certain to
belong to the answer is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Turns growing token ids into growing text."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        ...

    def flush(self) -> str:
        """Return what was held back, at the end."""
        ...


class ByteDetokenizer:
    """For vocabularies in which each token stands for fixed bytes (byte-level BPE): a table look-up per token.

    A model's output layer may be wider than its vocabulary (padding): a token beyond the table has no text.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        # As the tokenizer's own decoder does, bytes that are no UTF-8 are left out.
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, tokens: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        table = self._table
        size = len(table)
        return self._decoder.decode(b"".join([table[token] for token in tokens if token < size]))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window again for each token and emits what it grew by.

    The window starts at a token where the text was last complete, so context-dependent decoding (a leading space that
    is dropped only at the start, a character over several tokens) comes out as if all had been decoded at once.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, tokens: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        self._tokens += tokens
        return self._emit(final=False)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        known = self._decode(self._tokens[self._prefix : self._read])
        text = self._decode(self._tokens[self._prefix :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return text[len(known) :]


@dataclass(slots=True)
class StopMatcher:
    """Cuts the text at the first stop sequence, however it is split over pieces; with `include`, after it."""

    stops: tuple[str, ...]
    include: bool = False
    matched: str | None = None
    _held: str = ""

    def push(self, text: str) -> str:
        """Add text; return the part that no stop sequence can begin in any more. After a match, nothing."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        self._held += text
        hits = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            text, self._held = self._held[: at + len(self.matched) if self.include else at], ""
            return text
        keep = self._possible_start()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of the generation."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self) -> int:
        """The length of the longest end of the held text with which a stop sequence begins."""
        longest = max(len(stop) for stop in self.stops) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self.stops):
                return size
        return 0
