"""An answer: token ids become text, up to a stop sequence, and text becomes blocks, which every dialect renders."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np
import orjson
from msgspec import structs
from prometheus_client import Counter

from worker_node.core.errors import NodeError
from worker_node.core.types import NOT_MEASURED, Route, Timing, Usage
from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.manager.placement import Placement
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.serving.run import Execution
from worker_node.tasks.generate.blocks import (
    Block,
    BlockEvent,
    BlockKind,
    ChoiceEvents,
    Closed,
    Finished,
    FinishReason,
    Grown,
    Opened,
    Parser,
    TokenLogprob,
)
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.messages import EDGE_ONLY, GenerateJob, Sampling, TokenDelta
from worker_node.tasks.generate.metrics import GenerationMetrics

if TYPE_CHECKING:
    from worker_node.tasks.generate.prompting import PreparedGeneration


class Blocks:
    """The blocks of an answer under construction; `take` returns what has changed.

    With `single_call` only the first call counts. Models write blanks around calls: with `skip_blanks`, blanks without
    words are not text. `calls` have begun so far. `in_reasoning`: what came last is reasoning.
    """

    def __init__(self, *, single_call: bool = False, skip_blanks: bool = True) -> None:
        self._single_call = single_call
        self._skip_blanks = skip_blanks
        self._blanks = ""
        self.calls = 0
        self._changes: list[BlockEvent] = []
        self.blocks: list[Block] = []
        self.in_reasoning = False

    def add_text(self, text: str, kind: BlockKind = BlockKind.TEXT) -> None:
        """Continue the text or the reasoning, or begin one."""
        # Until something else comes, what is held back belongs to the reasoning as well.
        self.in_reasoning = kind is BlockKind.REASONING
        if not self.blocks or self.blocks[-1].kind is not kind or not self.blocks[-1].open:
            text = self._blanks + text
            if kind is BlockKind.TEXT and self._skip_blanks and not text.strip():
                self._blanks = text
                return
            self._open(kind)
        self._grow(text)

    def begin_call(self, name: str) -> None:
        self.in_reasoning = False
        self.calls += 1
        if self.calls == 1 or not self._single_call:
            self._open(BlockKind.CALL, name, self.calls - 1)

    def add_arguments(self, text: str) -> None:
        if self.calls == 1 or not self._single_call:
            self._grow(text)

    def close(self, *, cut: bool = False) -> None:
        if not self.blocks or not self.blocks[-1].open:
            return
        block = self.blocks[-1]
        block.open = False
        block.cut = cut and not (block.kind is BlockKind.CALL and _is_json(block.text))
        self._changes.append(Closed(block))

    def take(self) -> list[BlockEvent]:
        changes, self._changes = self._changes, []
        return changes

    def _open(self, kind: BlockKind, name: str = "", call: int = 0) -> None:
        self._blanks = ""
        self.close()
        self.blocks.append(Block(kind, len(self.blocks), name, call, token_hex(12)))
        self._changes.append(Opened(self.blocks[-1]))

    def _grow(self, text: str) -> None:
        block = self.blocks[-1]
        block.parts.append(text)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Grown):
            last.text += text
        else:
            self._changes.append(Grown(block, text))


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


class AnswerBuilder:
    """An answer under construction, and the data for its last event.

    Within the first `min_tokens` neither stop sequences nor stop tokens end it. What ends it is not part of its text,
    nor are special tokens. `tokens` are those of the answer so far, `unreported` those that no metric has counted yet.
    The engine had the last ones `at` that time. `ended`: a stop sequence or a stop token ended it; it is `complete` too
    when the engine says so. Times are monotonic.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        parser: Parser | None = None,
        *,
        single_call: bool = False,
        prompt_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer(tokenizer)
        self._sampling = sampling
        self._stop = StopMatcher(sampling.stop)
        self._parser = parser
        self._blocks = Blocks(single_call=single_call, skip_blanks=parser is not None)
        self._finish = FinishReason.STOP
        self._prompt_tokens = prompt_tokens
        self._reasoning_tokens = 0
        self._cached_tokens: int | None = None
        self._logprob = 0.0
        self._logprobs: list[TokenLogprob] = []
        self._ids: list[int] = []
        self.tokens = 0
        self.unreported = 0
        self.busy = NOT_MEASURED
        self.ended = self.complete = False
        self.at = 0.0
        self.submitted = self.started = time.monotonic()
        self.first_token: float | None = None

    def push(self, delta: TokenDelta) -> list[BlockEvent]:
        """Add tokens; return what is certain now."""
        before = self.tokens
        self.at = delta.at or time.monotonic()
        text = self._text_of(delta.tokens)
        taken = delta.tokens[: self.tokens - before]
        self.unreported += len(delta.tokens)
        if self._sampling.token_ids:
            self._ids += taken
        logprobs = self._with_logprobs(taken, delta.logprobs) if delta.logprobs else ()
        self._parse(text)
        events = self._blocks.take()
        if logprobs:
            grown = (event for event in events if isinstance(event, Grown) and event.block.kind is BlockKind.TEXT)
            if (first := next(grown, None)) is None:
                events.insert(0, Grown(Block(BlockKind.TEXT, -1), "", logprobs))
            else:
                first.logprobs = logprobs
        self._reasoning_tokens += len(taken) if self._blocks.in_reasoning else 0
        self.busy = delta.busy or self.busy
        self._prompt_tokens = delta.prompt_tokens or self._prompt_tokens
        self._cached_tokens = delta.cached
        if delta.finish is not None:
            self._finish = FinishReason(delta.finish)
        self.complete = self.ended or delta.finish is not None
        return events

    def flush(self) -> list[BlockEvent]:
        """Return what was held back, at the end."""
        if self._stop.matched is None:
            self._parse(self._stop.push(self._detokenizer.flush()) + self._stop.flush())
        events = self._blocks.take()
        cut = self._finish_reason() is FinishReason.LENGTH
        if self._parser is not None:
            self._parser.finish(self._blocks, cut=cut)
        self._blocks.close(cut=cut)
        return events + self._blocks.take()

    def finished(self, arrived: float, tokenize_s: float) -> Finished:
        now = time.monotonic()
        return Finished(
            finish_reason=self._finish_reason(),
            usage=Usage(self._prompt_tokens, self.tokens, self._reasoning_tokens, self._cached_tokens),
            timing=Timing(
                queue=max(0.0, self.started - self.submitted) * 1e3,
                tokenize=tokenize_s * 1e3,
                inference=(now - self.started) * 1e3,
                total=(now - arrived) * 1e3,
                first_token=None if self.first_token is None else (self.first_token - arrived) * 1e3,
            ),
            busy=self.busy,
            stop_sequence=self._stop.matched,
            mean_logprob=self._logprob / self.tokens if self.tokens else -math.inf,
            token_ids=tuple(self._ids),
            logprobs=self._logprobs,
            blocks=self._blocks.blocks,
        )

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Count tokens up to the one that ends the answer; return the text that is certain with them."""
        sampling, text = self._sampling, ""
        if not (sampling.stop or sampling.stop_token_ids):
            self.tokens += len(tokens)
            return self._detokenizer.push(tokens)
        for token in tokens:
            self.tokens += 1
            may_end = self.tokens > sampling.min_tokens
            if may_end and token in sampling.stop_token_ids:
                self.ended = True
                break
            piece = self._detokenizer.push([token])
            text += self._stop.push(piece) if may_end else piece
            self.ended = self._stop.matched is not None
            if self.ended:
                break
        return text

    def _parse(self, text: str) -> None:
        if text and self._parser is None:
            self._blocks.add_text(text)
        elif text and self._parser is not None:
            self._parser.push(text, self._blocks)

    def _finish_reason(self) -> FinishReason:
        if self.ended:
            return FinishReason.STOP
        # An answer that was cut within a call is cut, not a call.
        called = self._blocks.calls > 0
        return FinishReason.TOOL_CALLS if called and self._finish is FinishReason.STOP else self._finish

    def _with_logprobs(self, tokens: Sequence[int], values: Sequence[float]) -> tuple[TokenLogprob, ...]:
        """The probabilities of tokens that are text; special tokens, such as the end of the answer, have none."""
        found: list[TokenLogprob] = []
        for token, value in zip(tokens, values, strict=False):
            self._logprob += value
            if utf8 := self._tokenizer.piece(token):
                found.append(TokenLogprob(utf8.decode("utf-8", "replace"), utf8, value))
        self._logprobs += found
        return tuple(found)


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
        keep = max(overlap(self._held, stop) for stop in self.stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def flush(self) -> str:
        """Return what was held back, at the end of the generation."""
        text, self._held = self._held, ""
        return text


_THINK, _END_OF_THINKING = "<think>", "</think>"


class _In(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningFirst:
    """Separates reasoning at the start of the answer from the rest, which goes to the parser that `answer` makes.

    `begun`: the prompt ends inside the reasoning, as with the templates of some models.
    """

    def __init__(self, answer: Callable[[], Parser] | None = None, *, begun: bool = False) -> None:
        self._answer = None if answer is None else answer()
        self._in = _In.THOUGHT if begun else _In.START
        self._held = ""

    def push(self, text: str, blocks: Blocks) -> None:
        self._held += text
        if self._in is _In.START:
            start = self._held.lstrip()
            if start.startswith(_THINK):
                self._held = start[len(_THINK) :]
                self._in = _In.THOUGHT
            elif not _THINK.startswith(start):
                self._in = _In.ANSWER
        if self._in is _In.THOUGHT:
            self._read_thought(blocks)
        if self._in is _In.GAP:
            # Blank lines between the reasoning and the answer belong to neither.
            self._held = self._held.lstrip()
            if self._held:
                self._in = _In.ANSWER
        if self._in is _In.ANSWER:
            held, self._held = self._held, ""
            if self._answer is not None:
                self._answer.push(held, blocks)
            elif held:
                blocks.add_text(held)

    def finish(self, blocks: Blocks, *, cut: bool) -> None:
        thinking, self._in = self._in is _In.THOUGHT, _In.ANSWER
        if thinking and self._held:
            blocks.add_text(self._held, BlockKind.REASONING)
        elif not thinking:
            self.push("", blocks)
        if self._answer is not None:
            self._answer.finish(blocks, cut=cut)

    def _read_thought(self, blocks: Blocks) -> None:
        thought, found, after = self._held.partition(_END_OF_THINKING)
        if found:
            self._held = after
            self._in = _In.GAP
        else:
            kept = overlap(thought, _END_OF_THINKING)
            thought, self._held = thought[: len(thought) - kept], thought[len(thought) - kept :]
        if thought:
            blocks.add_text(thought, BlockKind.REASONING)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


# Token ids to text. A character may span several tokens: what is not yet certain is held back until `flush`.


class ByteDetokenizer:
    """For vocabularies in which each token stands for fixed bytes (byte-level BPE): a table look-up per token.

    A model's output layer may be wider than its vocabulary (padding): a token beyond the table has no text.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        # As the tokenizer's own decoder does, bytes that are no UTF-8 are left out.
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, tokens: Sequence[int]) -> str:
        table, text = self._table, b""
        for token in tokens:
            if token < len(table):
                text += table[token]
        return self._decoder.decode(text)

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


Detokenizer = ByteDetokenizer | WindowDetokenizer


def detokenizer(tokenizer: ChatTokenizer) -> Detokenizer:
    if tokenizer.byte_table is not None:
        return ByteDetokenizer(tokenizer.byte_table)
    return WindowDetokenizer(tokenizer.decode)


# Reading the engine.

# Seconds between reports of an answer's progress to admission and metrics.
_REPORT_S = 0.25


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads the answer of an admitted generation, in as many attempts as it takes, and reports its progress."""

    telemetry: Telemetry
    operation: Operation
    prepared: PreparedGeneration
    execution: Execution
    tokenize_s: float
    stream: bool
    index: int

    async def events(self) -> AsyncGenerator[ChoiceEvents, None]:
        """Yield changes of blocks, then `Finished`. A stop sequence ends the generation in the engine too.

        Where the NPU must be proven, what is yielded first is empty, when the first token has proven it.
        """
        operation, execution = self.operation, self.execution
        waiting = execution.proof_required
        try:
            while not execution.done:
                answer, last, report_at = self._new_answer(), [], 0.0
                route, job = execution.selection.route, self._job()
                counter = self.telemetry.own(GenerationMetrics).tokens.labels(route.model, route.device)
                try:
                    async with execution.attempt(job, TokenDelta) as deltas:
                        async for delta in deltas:
                            last = answer.push(delta)
                            if answer.first_token is None:
                                self._begun(answer, delta)
                            # Admission and metrics hear of the first token, of the end, and at times between them.
                            if answer.at >= report_at or answer.complete or delta.prefilled:
                                report_at = answer.at + _REPORT_S
                                self._report(answer, delta, counter)
                            if waiting:
                                waiting = False
                                yield ChoiceEvents(self.index, (), 0)
                            if answer.complete:
                                break
                            if last and self.stream:
                                yield ChoiceEvents(self.index, last, answer.tokens)
                finally:
                    counter.inc(answer.unreported)
            if execution.proof_required:
                execution.prove(answer.busy)
            rest = answer.flush()
            finished = answer.finished(self.prepared.request.context.arrived, self.tokenize_s)
            count_generation(self.telemetry, execution.selection.route, finished)
            if operation.recording:
                reason = finished.finish_reason.value
                operation.answered(finished.usage, finish_reason=reason, busy=finished.busy, ended=answer.at)
            events = [*last, *rest, finished] if self.stream else [finished]
            yield ChoiceEvents(self.index, events, answer.tokens)
        except NodeError as error:
            operation.failed(error)
            raise

    def _begun(self, answer: AnswerBuilder, delta: TokenDelta) -> None:
        """The first tokens have come: the engine works on the request."""
        if self.execution.proof_required:
            self.execution.prove(answer.busy)
        answer.first_token = time.monotonic()
        answer.started = delta.started or answer.submitted
        if self.operation.recording:
            self.operation.begin("prefill", answer.started)
            self.operation.begin("decode", answer.at)

    def _report(self, answer: AnswerBuilder, delta: TokenDelta, counter: Counter) -> None:
        self.execution.permit.progressed(
            answer.unreported,
            at=answer.at,
            prefilled=(delta.prefilled, delta.prefill_s),
            ended=answer.complete,
        )
        counter.inc(answer.unreported)
        answer.unreported = 0

    def _job(self) -> GenerateJob:
        """The job of the next attempt: another placement may leave less room for the answer."""
        prepared, request = self.prepared, self.prepared.request
        return GenerateJob(
            id=0,
            tokens=np.asarray(prepared.prompt.tokens, TOKEN_DTYPE).tobytes(),
            max_new_tokens=most_tokens(prepared, self.execution.selection.placement),
            deadline=request.context.deadline,
            sampling=structs.replace(request.sampling, **EDGE_ONLY),
            interactive=request.context.interactive,
            grammar=prepared.grammar,
            vision_prompt=prepared.prompt.vision_prompt,
            streamed_until=request.context.ends if self.stream else 0.0,
            edge_may_stop=bool(request.sampling.stop or request.sampling.stop_token_ids),
        )

    def _new_answer(self) -> AnswerBuilder:
        prepared = self.prepared
        use, parser = prepared.request.tool_use, prepared.prompt.parser
        return AnswerBuilder(
            prepared.model.tokenizer,
            prepared.request.sampling,
            None if parser is None else parser(),
            single_call=use is not None and use.single,
            prompt_tokens=prepared.demand.prompt_tokens,
        )


def most_tokens(prepared: PreparedGeneration, placement: Placement) -> int:
    """How many tokens the answer may have at a placement: no more than its window leaves."""
    request = prepared.request
    window = min(placement.total_limit, request.context_limit or placement.total_limit)
    room = min(prepared.model.max_tokens_limit, window - prepared.demand.prompt_tokens)
    return min(room, request.sampling.max_new_tokens or room)


def count_generation(telemetry: Telemetry, route: Route, finished: Finished) -> None:
    """Count a finished generation; its tokens were counted as they came."""
    timing, tokens = finished.timing, finished.usage.completion_tokens
    telemetry.finished(route, finished.usage, timing, busy=finished.busy)
    if timing.first_token is None:
        return
    own = telemetry.own(GenerationMetrics)
    own.first_token.labels(route.model, route.device).observe(timing.first_token / 1e3)
    telemetry.first_tokens.append((time.monotonic(), timing.first_token / 1e3))
    if tokens > 1:
        between = (timing.total - timing.first_token) / 1e3 / (tokens - 1)
        own.inter_token.labels(route.model, route.device).observe(between)
