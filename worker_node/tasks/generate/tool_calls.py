"""Tool calls: how a family of models is given its tools and writes its calls, and the parsers of its output.

Two ways of writing calls are known: JSON between tags (Hermes, Qwen, SmolLM), and the bare JSON of Llama 3. The parsers
are state machines over growing text; text that is not a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from worker_node.tasks.generate.answer import Blocks, overlap
from worker_node.tasks.generate.blocks import Parser
from worker_node.tasks.generate.request import Message, Tool, ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BLANKS = " \t\r\n"
_KEYS = frozenset({"id", "type", "name", "arguments", "parameters"})
# A call up to its arguments, in the order in which almost all models write it; others are read when they are complete.
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"(?P<key>[^"]*)"\s*:')


class TaggedCalls:
    """Text with calls between `<tool_call>` and `</tool_call>`: an object each, or a list of them."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._call = _Call(names)
        self._held = ""
        self._inside = False
        self._after_call = False

    def push(self, text: str, blocks: Blocks) -> None:
        for character in text:
            if self._inside:
                self._read_call(character, blocks)
            else:
                self._read_text(character, blocks)

    def finish(self, blocks: Blocks, *, cut: bool) -> None:
        # An unfinished call of which something was sent already cannot be taken back; its start is not text either.
        if self._held and not (self._inside and (cut or self._call.name)):
            blocks.add_text(self._held)

    def _read_text(self, character: str, blocks: Blocks) -> None:
        if self._after_call and character in _BLANKS:
            return  # the line breaks between calls are no answer
        self._after_call = False
        self._held += character
        if self._held == OPENING:
            self._inside = True
            self._call = _Call(self._names)
            return
        kept = overlap(self._held, OPENING)
        if kept < len(self._held):
            text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            blocks.add_text(text)

    def _read_call(self, character: str, blocks: Blocks) -> None:
        self._held += character
        call = self._call
        # Within a string the tag is an argument's text.
        if self._held.endswith(CLOSING) and not (call.in_string and call.name):
            self._close(blocks)
        elif call.broken or (not call.raw.strip() and character in "[,]" + _BLANKS):
            return
        elif not call.done:
            call.read(character, blocks)
        elif character == ",":
            self._call = _Call(self._names)

    def _close(self, blocks: Blocks) -> None:
        held, self._held, self._inside = self._held, "", False
        self._after_call = self._call.name is not None
        empty = not held.removeprefix(OPENING).removesuffix(CLOSING).strip(_BLANKS + "[]")
        if not self._after_call and not empty:
            blocks.add_text(held)


class CallsOrAnswer:
    """An answer that was held to be calls between tags or one JSON value: its first character tells which."""

    def __init__(self, calls: Parser) -> None:
        self._calls = calls
        self._is_call: bool | None = None

    def push(self, text: str, blocks: Blocks) -> None:
        if self._is_call is None and text.strip():
            self._is_call = text.lstrip().startswith(OPENING[0])
        if self._is_call:
            self._calls.push(text, blocks)
        elif self._is_call is False and text:
            blocks.add_text(text)

    def finish(self, blocks: Blocks, *, cut: bool) -> None:
        if self._is_call:
            self._calls.finish(blocks, cut=cut)


class BareCalls:
    """Llama's way: the whole answer is calls in JSON. With `single` it ends with the first."""

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self._names = names
        self._call = _Call(names)
        self._single = single
        self._held = ""
        self._plain = False

    def push(self, text: str, blocks: Blocks) -> None:
        for position, character in enumerate(text):
            if self._plain:
                blocks.add_text(text[position:])
                return
            self._read(character, blocks)

    def finish(self, blocks: Blocks, *, cut: bool) -> None:
        # Where the answer need not be a call, the beginning of one may as well be that of another object.
        missing_call = cut and self._single
        if not self._plain and self._held.strip() and self._call.name is None and not missing_call:
            blocks.add_text(self._held)
        self._plain = True

    def _read(self, character: str, blocks: Blocks) -> None:
        self._held += character
        if not self._held.strip():
            return
        if self._call.done:
            # Between two calls stand blanks, a semicolon or a comma; anything else is text.
            if self._single or character in _BLANKS + ";,":
                return
            self._call = _Call(self._names)
            self._held = character
            self._plain = character != "{"
        if not self._plain:
            self._call.read(character, blocks)
            self._plain = self._call.broken
        if self._plain:
            blocks.add_text(self._held)


@dataclass(slots=True)
class _Call:
    """Reads `{"name": …, "arguments": {…}}`, keys in any order, `parameters` for `arguments`.

    `name` is known when the arguments begin, which are added to the blocks as they come; in another order all is known
    at the end. An object of another kind, or with a name that is not in `names`, is `broken`: then it has no `name`,
    and what was read stays in `raw`.
    """

    names: Collection[str]
    name: str | None = None
    raw: str = ""
    done: bool = False
    broken: bool = False
    in_string: bool = False
    _depth: int = 0
    _escaped: bool = False
    _in_arguments: bool = False

    def read(self, character: str, blocks: Blocks) -> None:
        known = self.name is not None
        arguments = self._feed(character)
        if self.name is not None and not known:
            blocks.begin_call(self.name)
        if arguments:
            blocks.add_arguments(arguments)

    def _feed(self, character: str) -> str:
        """What is now certain of the arguments."""
        self.raw += character
        before = self._depth
        self._track(character)
        if self._in_arguments:
            self._in_arguments = self._depth > 1
            return character
        if self._depth == 0:
            if before:
                self.done = True
                return "" if self.name is not None else self._whole()
            self.broken = character not in _BLANKS
        elif self.name is None and not self.in_string:
            if character == "{" and self._depth == 2 and (head := _HEAD.fullmatch(self.raw[:-1])) is not None:
                self._in_arguments = self._named(head["name"])
                return character if self._in_arguments else ""
            if character == ":" and self._depth == 1 and (key := _FIRST_KEY.fullmatch(self.raw)) is not None:
                self.broken = key["key"] not in _KEYS
        return ""

    def _track(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self.in_string and character == "\\":
            self._escaped = True
        elif character == '"' and self._depth:
            self.in_string = not self.in_string
        elif not self.in_string:
            self._depth += character in "{[" if self._depth else character == "{"
            self._depth -= character in "}]" and self._depth > 0

    def _named(self, name: object) -> bool:
        self.broken = not (isinstance(name, str) and name in self.names)
        self.name = None if self.broken else str(name)
        return not self.broken

    def _whole(self) -> str:
        """The arguments of a complete object. Some models write them as a string, or null where there are none."""
        try:
            call = json.loads(self.raw)
        except (ValueError, RecursionError):
            call = {}
        arguments = call.get("arguments", call.get("parameters"))
        self.broken = call.keys() - _KEYS != set() or not isinstance(arguments, dict | str | None)
        if self.broken or not self._named(call.get("name")):
            return ""
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` stands before a call in JSON, `arguments` is the key that the arguments have in it.

    Calls are read with every key of `_KEYS` and `_HEAD`: another key for the arguments is added there, too.
    """

    parser: Callable[[Collection[str]], Parser]
    opening: str
    arguments: str = "arguments"
    listed: bool = False

    @property
    def beside_json(self) -> ToolFormat:
        """The format for answers that may be JSON as well: a call without tags could not be distinguished from them."""
        return self if self.opening else HERMES

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls of an earlier answer as the model would have written them."""
        bodies = [json.dumps({"name": c.name, self.arguments: c.arguments}, ensure_ascii=False) for c in calls]
        if not self.opening:
            return "; ".join(bodies)
        if self.listed:
            return f"<tool_call>[{', '.join(bodies)}]</tool_call>"
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


# What most models were trained on.
HERMES = ToolFormat(TaggedCalls, OPENING + "\n")
# By family; `HERMES` where nothing else is known.
TOOL_FORMATS = {
    "smollm": ToolFormat(TaggedCalls, OPENING, listed=True),
    "llama3": ToolFormat(BareCalls, "", arguments="parameters"),
}


def declaration(tool: Tool) -> dict[str, Any]:
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
    text = instructions(tools, wanted)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]
