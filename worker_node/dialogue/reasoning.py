"""Reasoning before the answer, between `<think>` and `</think>`."""

from __future__ import annotations

from enum import Enum, auto

from worker_node.core.types import Piece, Reasoning, Token
from worker_node.dialogue.tools import Parser

OPENING, CLOSING = "<think>", "</think>"


class _In(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningFirst:
    """Separates reasoning at the start of the answer from the rest, which goes to the next parser.

    `begun`: the prompt ends inside the reasoning, as with the templates of some models.
    """

    def __init__(self, answer: Parser | None = None, *, begun: bool = False) -> None:
        self._answer = answer
        self._in = _In.THOUGHT if begun else _In.START
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        if self._in is _In.ANSWER:
            return self._answer.push(text) if self._answer else [Token(text)] if text else []
        self._held += text
        match self._in:
            case _In.START:
                return self._at_start()
            case _In.THOUGHT:
                return self._in_thought()
        return self._in_gap()

    def flush(self) -> list[Piece]:
        """See `Parser`."""
        held, self._held = self._held, ""
        thinking = self._in is _In.THOUGHT
        self._in = _In.ANSWER
        pieces: list[Piece] = [Reasoning(held)] if thinking and held else [] if thinking else self.push(held)
        return [*pieces, *(self._answer.flush() if self._answer else [])]

    def _at_start(self) -> list[Piece]:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._held = start[len(OPENING) :]
            self._in = _In.THOUGHT
            return self._in_thought()
        return [] if OPENING.startswith(start) else self._go_on()

    def _in_thought(self) -> list[Piece]:
        before, found, after = self._held.partition(CLOSING)
        if found:
            self._held = after
            self._in = _In.GAP
            return [*([Reasoning(before)] if before else []), *self._in_gap()]
        keep = next((size for size in range(len(CLOSING) - 1, 0, -1) if CLOSING.startswith(before[-size:])), 0)
        keep = min(keep, len(before))
        given, self._held = before[: len(before) - keep], before[len(before) - keep :]
        return [Reasoning(given)] if given else []

    def _in_gap(self) -> list[Piece]:
        """Blank lines between the reasoning and the answer belong to neither."""
        self._held = self._held.lstrip()
        return self._go_on() if self._held else []

    def _go_on(self) -> list[Piece]:
        held, self._held = self._held, ""
        self._in = _In.ANSWER
        return self.push(held)
