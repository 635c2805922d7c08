"""An answer as a sequence of blocks: text, reasoning, calls of tools. Every dialect renders this sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from secrets import token_hex
from typing import Protocol

import orjson

from worker_node.core.types import NOT_MEASURED, Busy, Timing, Usage


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a tool; `call` numbers the calls of one answer from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    call: int
    text: str


Piece = Token | Reasoning | ToolCallStarted | ToolCallArguments


class Parser(Protocol):
    """Splits growing text into pieces; `flush` returns what was held back, at the end.

    `cut`: the length of the answer was used up. Then the beginning of a call is not text, but a call that is missing.
    """

    def push(self, text: str) -> list[Piece]: ...
    def flush(self, *, cut: bool) -> list[Piece]: ...


class BlockKind(StrEnum):
    """Kinds of blocks."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer, at the place `index`. Only the last block of an answer is `open`.

    The text of a call is the JSON of its arguments; `call` numbers the calls of one answer. `cut`: the length of the
    answer was used up within the block.
    """

    kind: BlockKind
    index: int
    name: str = ""
    call: int = 0
    id: str = field(default_factory=lambda: token_hex(12))
    open: bool = True
    cut: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token as it was generated, and the natural logarithm of its probability."""

    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins, without text; those before it are closed. Its `block` may be ahead of the event."""

    block: Block


@dataclass(slots=True)
class Grown:
    """The open block grew by `text`.

    `logprobs`, where asked for, are those of the tokens that arrived; the text of some may still be held back. Where
    there is no text for them they come with an empty one, of a block that was not opened.
    """

    block: Block
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete, or cut."""

    block: Block


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation, with its `blocks`.

    `mean_logprob` is that of its tokens where log probabilities were asked for, `token_ids` those of the answer where
    they were.
    """

    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    busy: Busy = NOT_MEASURED
    stop_sequence: str | None = None
    mean_logprob: float = -math.inf
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprob] = ()
    blocks: Sequence[Block] = ()

    @property
    def calls(self) -> list[Block]:
        """The calls, without one that was cut: nobody could run it."""
        return [block for block in self.blocks if block.kind is BlockKind.CALL and not block.cut]

    def text(self, kind: BlockKind = BlockKind.TEXT) -> str:
        """The text of all blocks of that kind."""
        return "".join([block.text for block in self.blocks if block.kind is kind])


BlockEvent = Opened | Grown | Closed
Event = BlockEvent | Finished


class BlockReader:
    """Text to `blocks`, through the parser where there is one. With `single` only the first call counts.

    Where a parser separates calls or reasoning from the text, blanks without words are no text: models write them
    around calls. `reasoning`: what came last is reasoning.
    """

    def __init__(self, parser: Parser | None, *, single: bool) -> None:
        self._parser = parser
        self._single = single
        self._blanks = ""
        self.blocks: list[Block] = []
        self.reasoning = False

    def read(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> list[BlockEvent]:
        """Return what is certain after more text, with the log probabilities of its tokens."""
        pieces: list[Piece] = []
        if text:
            pieces = [Token(text)] if self._parser is None else self._parser.push(text)
        events = self._add(pieces)
        if logprobs:
            grown = (event for event in events if isinstance(event, Grown) and event.block.kind is BlockKind.TEXT)
            if (first := next(grown, None)) is None:
                return [Grown(Block(BlockKind.TEXT, -1), "", logprobs), *events]
            first.logprobs = logprobs
        return events

    def finish(self, text: str, *, cut: bool) -> list[BlockEvent]:
        """Return the rest, after the last of the text; `cut` as in `Parser`."""
        events = self.read(text, ())
        if self._parser is not None:
            events += self._add(self._parser.flush(cut=cut))
        return events + self._close(cut=cut)

    def _add(self, pieces: Sequence[Piece]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for piece in pieces:
            # Until something else comes, what is held back belongs to the reasoning as well.
            self.reasoning = isinstance(piece, Reasoning)
            if isinstance(piece, ToolCallStarted | ToolCallArguments):
                if not (self._single and piece.call):
                    events += self._add_to_call(piece)
            else:
                events += self._add_text(BlockKind.REASONING if self.reasoning else BlockKind.TEXT, piece.text)
        return events

    def _add_to_call(self, piece: ToolCallStarted | ToolCallArguments) -> list[BlockEvent]:
        if isinstance(piece, ToolCallStarted):
            return self._open(BlockKind.CALL, piece.name, piece.call)
        return [self._grow(piece.text)]

    def _add_text(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        if self.blocks and self.blocks[-1].kind is kind and self.blocks[-1].open:
            return [self._grow(text)]
        if kind is BlockKind.TEXT and self._parser is not None:
            text = self._blanks + text
            if not text.strip():
                self._blanks = text
                return []
        return [*self._open(kind), self._grow(text)]

    def _open(self, kind: BlockKind, name: str = "", call: int = 0) -> list[BlockEvent]:
        self._blanks = ""
        closed = self._close()
        self.blocks.append(Block(kind, len(self.blocks), name, call))
        return [*closed, Opened(self.blocks[-1])]

    def _grow(self, text: str) -> Grown:
        block = self.blocks[-1]
        block.parts.append(text)
        return Grown(block, text)

    def _close(self, *, cut: bool = False) -> list[BlockEvent]:
        if not self.blocks or not self.blocks[-1].open:
            return []
        block = self.blocks[-1]
        block.open = False
        block.cut = cut and not (block.kind is BlockKind.CALL and _is_json(block.text))
        return [Closed(block)]


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
