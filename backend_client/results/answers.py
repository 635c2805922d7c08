"""Results of generation and chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client.results.origin import Origin, Usage


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, as the node measured them; None where it did not say."""

    queue: float | None = None
    tokenize: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult(Origin):
    """An answer. `finish_reason` is "stop" or "length"."""

    text: str = field(repr=False)
    finish_reason: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str = field(repr=False)

    def parsed_arguments(self) -> Any:
        """The arguments as an object. Raises ValueError where the model wrote no valid JSON."""
        return json.loads(self.arguments or "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One answer of a chat. `message` is OpenAI's object, to be appended to the messages of the next call."""

    text: str = field(repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    reasoning: str = field(default="", repr=False)
    logprobs: Mapping[str, Any] | None = field(default=None, repr=False)
    message: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult(Origin):
    """A chat's answer; `n` of them in `choices`. `parsed` is an object of the pydantic model, where one was given."""

    choices: tuple[ChatChoice, ...]
    usage: Usage
    parsed: Any = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The text of the first choice; "" beside tool calls."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str:
        """stop, length, tool_calls or content_filter."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> Mapping[str, Any]:
        """The first choice as an OpenAI message."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call: the first has `id` and `name`, the others a part of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of a streamed chat: some text, or reasoning, or parts of tool calls, of the choice with that index."""

    text: str = field(default="", repr=False)
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = field(default="", repr=False)
    choice: int = 0
