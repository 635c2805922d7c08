"""What an answer is made of: blocks of text, reasoning and calls, and the events in which they grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from worker_node.core.types import NOT_MEASURED, Busy, Timing, Usage

if TYPE_CHECKING:
    from worker_node.tasks.generate.answer import Blocks


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class BlockKind(StrEnum):
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
    id: str = ""
    open: bool = True
    cut: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
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

    `logprobs`, where asked for, are those of the tokens that arrived; the text of some may still be held back. Tokens
    without any text come with an empty `text`, and no block is opened for them.
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
        return "".join([block.text for block in self.blocks if block.kind is kind])


BlockEvent = Opened | Grown | Closed
Event = BlockEvent | Finished


class Parser(Protocol):
    """Splits growing text into text, reasoning and calls, which it adds to `blocks`.

    `finish` adds what was held back. `cut`: the length of the answer was used up. Then the beginning of a call is not
    text, but a call that is missing.
    """

    def push(self, text: str, blocks: Blocks) -> None: ...
    def finish(self, blocks: Blocks, *, cut: bool) -> None: ...


class ChoiceEvents(NamedTuple):
    """What happened at once in the generation number `choice`, which has made `tokens` so far."""

    choice: int
    events: Sequence[Event]
    tokens: int
