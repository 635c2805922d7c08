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

from worker_node.tasks.generate.blocks import Parser, Piece, Token, ToolCallArguments, ToolCallStarted
from worker_node.tasks.generate.chat import Message, Tool, ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BLANKS = " \t\r\n"
_KEYS = frozenset({"id", "type", "name", "arguments", "parameters"})
# A call up to its arguments, in the order in which almost all models write it; others are read when they are complete.
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"(?P<key>[^"]*)"\s*:')


class _Calls:
    """Numbers the calls of one answer and holds the scanner of the one that is being read."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._count = 0
        self.start()

    def start(self) -> None:
        """Start the next call."""
        self.scanner = CallScanner(self._names)
        self.announced = False

    def feed(self, character: str) -> list[Piece]:
        """Read one character of the call."""
        arguments = self.scanner.feed(character)
        if self.scanner.name is None:
            return []
        pieces: list[Piece] = []
        if not self.announced:
            self.announced = True
            self._count += 1
            pieces.append(ToolCallStarted(self._count - 1, self.scanner.name))
        return [*pieces, ToolCallArguments(self._count - 1, arguments)] if arguments else pieces


class TaggedCalls:
    """Text with calls between `<tool_call>` and `</tool_call>`: an object each, or a list of them."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._held = ""
        self._inside = False
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for character in text:
            pieces += self._in_call(character) if self._inside else self._in_text(character)
        return _joined(pieces)

    def flush(self, *, cut: bool) -> list[Piece]:
        held, self._held = self._held, ""
        # An unfinished call of which something was sent already cannot be taken back; its start is not text either.
        return [Token(held)] if held and not (self._inside and (cut or self._calls.announced)) else []

    def _in_text(self, character: str) -> list[Piece]:
        if self._after_call and character in _BLANKS:
            return []  # the line breaks between calls are no answer
        self._after_call = False
        self._held += character
        if self._held == OPENING:
            self._inside = True
            self._calls.start()
            return []
        if OPENING.startswith(self._held):
            return []
        # The held text may end with another beginning of the tag.
        keep = next((size for size in range(len(self._held) - 1, 0, -1) if OPENING.startswith(self._held[-size:])), 0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [Token(text)]

    def _in_call(self, character: str) -> list[Piece]:
        self._held += character
        scanner = self._calls.scanner
        # Within a string the tag is an argument's text.
        if self._held.endswith(CLOSING) and not (scanner.in_string and self._calls.announced):
            return self._close()
        if scanner.broken or (not scanner.raw.strip() and character in "[,]" + _BLANKS):
            return []
        if scanner.done:
            if character == ",":
                self._calls.start()
            return []
        return self._calls.feed(character)

    def _close(self) -> list[Piece]:
        held, self._held, self._inside = self._held, "", False
        announced = self._after_call = self._calls.announced
        empty = not held.removeprefix(OPENING).removesuffix(CLOSING).strip(_BLANKS + "[]")
        return [] if announced or empty else [Token(held)]


class CallsOrAnswer:
    """An answer that was held to be calls between tags or one JSON value: its first character tells which."""

    def __init__(self, calls: Parser) -> None:
        self._calls = calls
        self._is_call: bool | None = None

    def push(self, text: str) -> list[Piece]:
        if self._is_call is None and text.strip():
            self._is_call = text.lstrip().startswith(OPENING[0])
        if self._is_call is None:
            return []
        return self._calls.push(text) if self._is_call else [Token(text)] if text else []

    def flush(self, *, cut: bool) -> list[Piece]:
        return self._calls.flush(cut=cut) if self._is_call else []


class BareCalls:
    """Llama's way: the whole answer is calls in JSON. With `single` it ends with the first."""

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self._calls = _Calls(names)
        self._single = single
        self._held = ""
        self._plain = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for position, character in enumerate(text):
            if self._plain:
                return _joined([*pieces, Token(text[position:])])
            pieces += self._read(character)
        return _joined(pieces)

    def flush(self, *, cut: bool) -> list[Piece]:
        if self._plain or not self._held:
            return []
        held, self._held, self._plain = self._held, "", True
        # Where the answer need not be a call, the beginning of one may as well be that of another object.
        return [] if self._calls.announced or not held.strip() or (cut and self._single) else [Token(held)]

    def _read(self, character: str) -> list[Piece]:
        self._held += character
        if not self._held.strip():
            return []
        scanner = self._calls.scanner
        if scanner.done:
            return self._after(character)
        pieces = self._calls.feed(character)
        return self._give_up() if self._calls.scanner.broken and not self._calls.announced else pieces

    def _after(self, character: str) -> list[Piece]:
        """Between two calls stand blanks, a semicolon or a comma; anything else is text."""
        if self._single or character in _BLANKS + ";,":
            return []
        self._calls.start()
        self._held = character
        return self._calls.feed(character) if character == "{" else self._give_up()

    def _give_up(self) -> list[Piece]:
        held, self._held, self._plain = self._held, "", True
        return [Token(held)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Token) and isinstance(last, Token):
            joined[-1] = Token(last.text + piece.text)
        elif isinstance(piece, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.call == piece.call:
            joined[-1] = ToolCallArguments(piece.call, last.text + piece.text)
        else:
            joined.append(piece)
    return joined


@dataclass(slots=True)
class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`, keys in any order, `parameters` for `arguments`.

    `name` is known when the arguments begin, which are given out as they come; in another order all is known at the
    end. An object of another kind, or with a name that is not in `names`, is `broken`: what was read stays in `raw`.
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

    def feed(self, character: str) -> str:
        """Read one character; returns what is now certain of the arguments."""
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
        """Follow strings and braces."""
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

    def forced_parser(self, names: Collection[str]) -> Parser:
        """What reads an answer that was held to be one call, after `opening`."""
        return BareCalls(names, single=True)

    def free_parser(self, names: Collection[str]) -> Parser:
        """What reads an answer that was held to be calls between tags or JSON."""
        return CallsOrAnswer(self.parser(names))

    @property
    def beside_json(self) -> ToolFormat:
        """The format for answers that may be JSON as well: a call without tags could not be distinguished from them."""
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
    text = instructions(tools, wanted)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]
