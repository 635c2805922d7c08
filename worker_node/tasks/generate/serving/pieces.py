"""From the text of an answer to its pieces: plain text, reasoning, tool calls."""

from __future__ import annotations

from worker_node.core.types import Piece, Reasoning, Token, TokenLogprob, ToolCallArguments, ToolCallStarted
from worker_node.dialogue.tools import Parser


class PieceReader:
    """Text to pieces, through the parser where there is one.

    `called`: a tool has been called; `reasoning`: what came last is reasoning. With `single` only the first call
    counts.
    """

    def __init__(self, parser: Parser | None, *, single: bool) -> None:
        self._parser = parser
        self._single = single
        self.called = False
        self.reasoning = False

    def read(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> list[Piece]:
        """Return what is certain after more text, with the log probabilities of its tokens."""
        if self._parser is None:
            return [Token(text, logprobs)] if text or logprobs else []
        pieces = self._noted(self._parser.push(text) if text else [])
        if not logprobs:
            return pieces
        if pieces and isinstance(pieces[0], Token):
            return [Token(pieces[0].text, logprobs), *pieces[1:]]
        return [Token("", logprobs), *pieces]

    def finish(self, text: str) -> list[Piece]:
        """Return the rest, after the last of the text."""
        if self._parser is None:
            return [Token(text)] if text else []
        return self._noted(self._parser.push(text) + self._parser.flush())

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        if self._single:
            pieces = [p for p in pieces if not (isinstance(p, ToolCallStarted | ToolCallArguments) and p.call > 0)]
        # Until something else comes, what is held back belongs to the reasoning as well.
        self.reasoning = isinstance(pieces[-1], Reasoning) if pieces else self.reasoning
        self.called = self.called or any(isinstance(piece, ToolCallStarted) for piece in pieces)
        return pieces
