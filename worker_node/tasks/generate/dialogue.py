"""Separates tool calls and reasoning from the answer while a model's output streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from worker_node.core.types import Message, Piece, Reasoning, Token, Tool, ToolCall
from worker_node.tasks.generate.tool_calls import OPENING, BareCalls, CallsOrAnswer, OneCall, Parser, TaggedCalls

# How each family of models is given its tools, and how it writes a call.


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` stands before a call in JSON, `arguments` is the key that the arguments have in it."""

    parser: Callable[[Collection[str]], Parser]
    opening: str
    arguments: str = "arguments"
    listed: bool = False

    def forced_parser(self, names: Collection[str]) -> Parser:
        """What reads an answer that was held to be one call, after `opening`."""
        return OneCall(names)

    def free_parser(self, names: Collection[str]) -> Parser:
        """What reads an answer that was held to be calls between tags or JSON."""
        return CallsOrAnswer(self.parser(names))

    @property
    def beside_json(self) -> ToolFormat:
        """The format for answers that may be JSON as well: a call without tags could not be told from them."""
        return self if self.opening else _TAGGED

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls of an earlier answer as the model would have written them."""
        bodies = [json.dumps({"name": c.name, self.arguments: c.arguments}, ensure_ascii=False) for c in calls]
        if not self.opening:
            return "; ".join(bodies)
        if self.listed:
            return f"<tool_call>[{', '.join(bodies)}]</tool_call>"
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


_TAGGED = ToolFormat(TaggedCalls, OPENING + "\n")
_FORMATS = {
    "smollm": ToolFormat(TaggedCalls, OPENING, listed=True),
    "llama3": ToolFormat(BareCalls, "", arguments="parameters"),
}


def tool_format(family: str) -> ToolFormat:
    """The format of a family of models; Hermes' where nothing else is known, as it is what most were trained on."""
    return _FORMATS.get(family, _TAGGED)


def declaration(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def instructions(tools: Sequence[Tool], wanted: ToolFormat) -> str:
    """The text that gives a model its tools where its own chat template has no place for them."""
    listed = "\n".join(json.dumps(declaration(tool)["function"], ensure_ascii=False) for tool in tools)
    example = wanted.written([ToolCall("function_name", {"argument": "value"})])
    return (
        "You can call the functions below. Call one, or several, only if that helps to answer; otherwise answer in "
        f"words.\n<tools>\n{listed}\n</tools>\nA call is written exactly so, and nothing else with it:\n{example}"
    )


def with_instructions(messages: Sequence[Message], tools: Sequence[Tool], wanted: ToolFormat) -> list[Message]:
    """The conversation with the tools in its system message."""
    told = instructions(tools, wanted)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


# Reasoning before the answer, between `<think>` and `</think>`.

_OPENING, CLOSING = "<think>", "</think>"


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
        if start.startswith(_OPENING):
            self._held = start[len(_OPENING) :]
            self._in = _In.THOUGHT
            return self._in_thought()
        return [] if _OPENING.startswith(start) else self._go_on()

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
