"""How each family of models is given its tools, and how it writes a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from worker_node.core.types import Message, Tool, ToolCall
from worker_node.dialogue.tools import OPENING, BareCalls, CallsOrAnswer, OneCall, Parser, TaggedCalls


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
