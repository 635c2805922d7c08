"""Text that is generated: how it is sampled, the forms it is held to, and the events of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from worker_node.domain.requests import Timing, Usage


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 means greedy, `top_k` 0 all tokens.

    `min_p` leaves out tokens less likely than this share of the likeliest. `presence_penalty` and `frequency_penalty`
    are subtracted from the logits of tokens that the answer holds already, once and once per occurrence;
    `repetition_penalty` divides those of the prompt and the answer. `logprobs` asks for the logarithm of each chosen
    token's probability. `choices` is how many answers the caller wants to the one prompt, of which this is one.
    Within its first `min_tokens` tokens an answer does not end. `stop_token_ids` end it as stop sequences do; with
    `include_stop` what ended it is part of its text. Without `skip_special_tokens` special tokens are text too.

    `open_fields` are the fields that the request says nothing of: there the model's own defaults count, unless its
    dialect has `dialect_defaults` (docs/models.md).
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: bool = False
    choices: int = 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    open_fields: frozenset[str] = field(default=frozenset(), compare=False)
    dialect_defaults: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenized already, with the model's own tokenizer."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The JSON schema that an answer must match, not checked yet, and its place in the request; `strict` as in Tool."""

    schema: Any
    where: str
    strict: bool = True


@dataclass(frozen=True, slots=True)
class GivenForm:
    """A regular expression that the whole answer must match, or a grammar as llama.cpp takes it; not checked yet."""

    kind: Literal["regex", "grammar"]
    source: str
    where: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token as it was generated, and the natural logarithm of its probability."""

    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the answer's text, as soon as it is known to be part of it.

    `logprobs`, where asked for, are those of the tokens that arrived; the text of some may still be held back.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation."""

    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    npu_busy_delta_us: int | None = None
    npu_busy_shared: bool = False
    stop_sequence: str | None = None
