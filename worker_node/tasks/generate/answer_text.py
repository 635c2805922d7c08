"""From token ids to the pieces of an answer (text, reasoning, tool calls), up to a stop sequence or a stop token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from worker_node.core.types import Piece, Reasoning, Sampling, Token, TokenLogprob, ToolCallArguments, ToolCallStarted
from worker_node.tasks.generate.tokenization import ChatTokenizer
from worker_node.tasks.generate.tool_calls import Parser


class AnswerText:
    """Takes the tokens of one generation as they arrive.

    Within the first `min_tokens` neither stop sequences nor stop tokens end the answer. What ends it is part of the
    text only with `include_stop`; special tokens are text only without `skip_special_tokens`.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        self._stop = StopMatcher(sampling.stop, include=sampling.include_stop)
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._least = sampling.min_tokens
        self._include = sampling.include_stop
        # The model's own end is a stop token too; the engine ends the answer with it.
        ends_itself = not sampling.ignore_eos and not sampling.include_stop
        self._hidden = tokenizer.end_tokens if ends_itself and not sampling.skip_special_tokens else frozenset()
        self._plain = not self._stop_tokens and not self._hidden and (not self._least or not sampling.stop)
        self._stops = bool(sampling.stop)
        self._count = 0
        self._stopped = False

    @property
    def matched(self) -> str | None:
        """The stop sequence that ended the answer."""
        return self._stop.matched

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, whatever the engine still sends."""
        return self._stopped or self._stop.matched is not None

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far, without those after its end."""
        return self._count

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        # With guessed tokens several come at once, and those behind a stop sequence are none of the answer.
        if self._plain and (len(tokens) == 1 or not self._stops):
            self._count += len(tokens)
            return self._stop.push(self._detokenizer.push(tokens))
        text = ""
        for token in tokens:
            if self.ended:
                break
            self._count += 1
            self._stopped = token in self._stop_tokens and self._count > self._least
            if (self._stopped and not self._include) or token in self._hidden:
                continue
            piece = self._detokenizer.push([token])
            text += piece if self._count <= self._least else self._stop.push(piece)
        return text

    def flush(self) -> str:
        """Return what was held back, at the end."""
        if self._stop.matched is not None:
            return ""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()


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


_THINK, _END_OF_THINKING = "<think>", "</think>"


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
        held, self._held = self._held, ""
        thinking = self._in is _In.THOUGHT
        self._in = _In.ANSWER
        pieces: list[Piece] = [Reasoning(held)] if thinking and held else [] if thinking else self.push(held)
        return [*pieces, *(self._answer.flush() if self._answer else [])]

    def _at_start(self) -> list[Piece]:
        start = self._held.lstrip()
        if start.startswith(_THINK):
            self._held = start[len(_THINK) :]
            self._in = _In.THOUGHT
            return self._in_thought()
        return [] if _THINK.startswith(start) else self._go_on()

    def _in_thought(self) -> list[Piece]:
        before, found, after = self._held.partition(_END_OF_THINKING)
        if found:
            self._held = after
            self._in = _In.GAP
            return [*([Reasoning(before)] if before else []), *self._in_gap()]
        ends = range(len(_END_OF_THINKING) - 1, 0, -1)
        keep = next((size for size in ends if _END_OF_THINKING.startswith(before[-size:])), 0)
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
