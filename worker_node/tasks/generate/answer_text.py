"""From token ids to the blocks of an answer, up to a stop sequence or a stop token."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from worker_node.core.types import NOT_MEASURED, Timing, Usage
from worker_node.tasks.generate.blocks import (
    BlockEvent,
    BlockKind,
    BlockReader,
    Finished,
    FinishReason,
    Parser,
    Piece,
    Reasoning,
    Token,
    TokenLogprob,
)
from worker_node.tasks.generate.messages import Sampling, TokenDelta


class TokenTexts(Protocol):
    """What an answer needs of its model's tokenizer."""

    def detokenizer(self) -> Detokenizer: ...
    def piece(self, token: int) -> bytes: ...


class Answer:
    """An answer under construction: its text, and the data for its last event.

    `tokens` are those of the answer so far, `unreported` those that no metric has counted yet. The engine had the last
    ones `at` that time. The times are monotonic.
    """

    def __init__(
        self, tokenizer: TokenTexts, sampling: Sampling, parser: Parser | None, *, single_call: bool, prompt_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, sampling)
        self._reader = BlockReader(parser, single=single_call)
        self._finish = FinishReason.STOP
        self._prompt_tokens = prompt_tokens
        self._reasoning_tokens = 0
        self._logprob = 0.0
        self._given: list[TokenLogprob] = []
        self._ids: list[int] | None = [] if sampling.token_ids else None
        self.tokens = 0
        self.unreported = 0
        self.busy = NOT_MEASURED
        self.stopped = False
        self.at = 0.0
        self.submitted = self.started = time.monotonic()
        self.first_token: float | None = None

    def push(self, delta: TokenDelta) -> list[BlockEvent]:
        """Add tokens; return what is certain now."""
        before = self.tokens
        self.at = delta.at or time.monotonic()
        text = self._text.push(delta.tokens)
        self.tokens = self._text.tokens
        # The text may have ended, even if the engine still sends tokens.
        self.stopped = self._text.ended
        taken = self.tokens - before
        self.unreported += len(delta.tokens)
        if self._ids is not None:
            self._ids += delta.tokens[:taken]
        self._logprob += sum(delta.logprobs[:taken]) if delta.logprobs else 0.0
        logprobs = self._logprobs(delta.tokens[:taken], delta.logprobs[:taken]) if delta.logprobs else ()
        self._given += logprobs
        events = self._reader.read(text, logprobs)
        self._reasoning_tokens += taken if self._reader.reasoning else 0
        self.busy = delta.busy
        self._prompt_tokens = delta.prompt_tokens or self._prompt_tokens
        if delta.finish is not None:
            self._finish = FinishReason(delta.finish)
        return events

    def flush(self) -> list[BlockEvent]:
        """Return what was held back, at the end."""
        return self._reader.finish(self._text.flush(), cut=self._finish_reason() is FinishReason.LENGTH)

    def finished(self, arrived: float, tokenize_s: float) -> Finished:
        """The last event, as of now."""
        now = time.monotonic()
        return Finished(
            finish_reason=self._finish_reason(),
            usage=Usage(self._prompt_tokens, self.tokens, self._reasoning_tokens),
            timing=Timing(
                queue=max(0.0, self.started - self.submitted) * 1e3,
                tokenize=tokenize_s * 1e3,
                inference=(now - self.started) * 1e3,
                total=(now - arrived) * 1e3,
                first_token=None if self.first_token is None else (self.first_token - arrived) * 1e3,
            ),
            busy=self.busy,
            stop_sequence=self._text.matched,
            mean_logprob=self._logprob / self.tokens if self.tokens else -math.inf,
            token_ids=tuple(self._ids or ()),
            logprobs=self._given,
            blocks=self._reader.blocks,
        )

    def _finish_reason(self) -> FinishReason:
        if self.stopped:
            return FinishReason.STOP
        # An answer that was cut within a call is cut, not a call.
        called = any(block.kind is BlockKind.CALL for block in self._reader.blocks)
        return FinishReason.TOOL_CALLS if called and self._finish is FinishReason.STOP else self._finish

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
        """The probabilities of tokens that are text; special tokens, such as the end of the answer, have none."""
        pieces = [(self._tokenizer.piece(token), value) for token, value in zip(tokens, logprobs, strict=True)]
        return tuple(TokenLogprob(piece.decode("utf-8", "replace"), piece, value) for piece, value in pieces if piece)


class AnswerText:
    """Takes the tokens of one generation as they arrive.

    Within the first `min_tokens` neither stop sequences nor stop tokens end the answer. What ends it is not part of the
    text, nor are special tokens.
    """

    def __init__(self, tokenizer: TokenTexts, sampling: Sampling) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopMatcher(sampling.stop)
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._least = sampling.min_tokens
        self._plain = not self._stop_tokens and (not self._least or not sampling.stop)
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
            if self._stopped:
                break
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
    """Cuts the text at the first stop sequence, however it is split over pieces."""

    stops: tuple[str, ...]
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
            text, self._held = self._held[:at], ""
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

    def flush(self, *, cut: bool) -> list[Piece]:
        held, self._held = self._held, ""
        thinking = self._in is _In.THOUGHT
        self._in = _In.ANSWER
        pieces: list[Piece] = [Reasoning(held)] if thinking and held else [] if thinking else self.push(held)
        return [*pieces, *(self._answer.flush(cut=cut) if self._answer else [])]

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


class Detokenizer(Protocol):
    """Turns growing token ids into growing text; one instance per generation.

    A character may span several tokens; what is not yet certain is held back.
    """

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
        table = self._table
        size = len(table)
        return self._decoder.decode(b"".join([table[token] for token in tokens if token < size]))

    def flush(self) -> str:
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
        self._tokens += tokens
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        known = self._decode(self._tokens[self._prefix : self._read])
        text = self._decode(self._tokens[self._prefix :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return text[len(known) :]
