"""One tool call in JSON, read character by character: its name and its arguments as they come."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

_BLANKS = " \t\r\n"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"id", "type", "name"})
_OPENING, _CLOSING = "{[", "}]"


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


@dataclass(slots=True)
class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`, keys in any order, `parameters` for `arguments`.

    `name` is known as soon as it has been read. Arguments are given out piece by piece from then on, and are kept until
    then. An object of another kind, or with a name that is not in `names`, is `broken`: what was read stays in `raw`.
    """

    names: Collection[str]
    name: str | None = None
    raw: str = ""
    _at: _At = _At.OBJECT
    _key: str = ""
    _value: str = ""
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _kept: str = ""
    _given: bool = False

    @property
    def done(self) -> bool:
        """The object is closed."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """This is no tool call."""
        return self._at is _At.BROKEN

    @property
    def in_string(self) -> bool:
        """What comes next stands within a string of JSON."""
        return self._in_string and self._at is _At.IN_VALUE

    def feed(self, character: str) -> Iterator[str]:
        """Read one character; yields what is now certain of the arguments, once `name` is known."""
        self.raw += character
        self._step(character)
        if self.name is not None:
            if self._kept:
                kept, self._kept = self._kept, ""
                self._given = True
                yield kept
            if self.done and not self._given:
                self._given = True
                yield "{}"
        elif self.done:
            self._at = _At.BROKEN

    def _step(self, character: str) -> None:
        match self._at:
            case _At.IN_KEY | _At.IN_VALUE:
                self._inside(character)
            case _At.OBJECT:
                self._expect(character, "{", _At.KEY)
            case _At.KEY if character == '"':
                self._open(_At.IN_KEY, character)
            case _At.KEY if character == "}":
                self._at = _At.DONE
            case _At.COLON:
                self._expect(character, ":", _At.VALUE)
            case _At.VALUE if character not in _BLANKS:
                self._open(_At.IN_VALUE, character)
            case _At.AFTER if character in ",}":
                self._at = _At.KEY if character == "," else _At.DONE
            case _:
                if character not in _BLANKS:
                    self._at = _At.BROKEN

    def _expect(self, character: str, wanted: str, then: _At) -> None:
        if character == wanted:
            self._at = then
        elif character not in _BLANKS:
            self._at = _At.BROKEN

    def _open(self, at: _At, character: str) -> None:
        self._at = at
        self._value = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._inside(character)

    def _inside(self, character: str) -> None:
        """Within a key or a value: find its end."""
        if self._in_string:
            self._take(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._close()
            return
        if character == '"':
            self._in_string = True
            self._take(character)
        elif character in _OPENING:
            self._depth += 1
            self._take(character)
        elif character in _CLOSING and self._depth > 0:
            self._depth -= 1
            self._take(character)
            if self._depth == 0:
                self._close()
        elif self._depth == 0 and character in ",}":
            self._close()
            self._step(character)
        elif self._depth == 0 and character in _BLANKS:
            self._close()
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        self._value += character
        if self._at is _At.IN_VALUE and self._key in _ARGUMENTS and self._value[0] == "{":
            self._kept += character

    def _close(self) -> None:
        """A key or a value is complete."""
        text, self._value = self._value, ""
        try:
            value = json.loads(text)
        except ValueError:
            self._at = _At.BROKEN
            return
        if self._at is _At.IN_KEY:
            self._key = value
            self._at = _At.COLON if value in _ARGUMENTS | _OTHERS else _At.BROKEN
            return
        self._at = _At.AFTER
        if self._key == "name":
            self.name = value if isinstance(value, str) and value in self.names and self.name is None else None
            if self.name is None:
                self._at = _At.BROKEN
        elif self._key in _ARGUMENTS and not isinstance(value, dict):
            self._other_arguments(value)

    def _other_arguments(self, value: object) -> None:
        # Some models write the object as a string, or null where there is none.
        if value is None:
            self._kept += "{}"
        elif isinstance(value, str):
            self._kept += value
        else:
            self._at = _At.BROKEN
