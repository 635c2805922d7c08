"""Server-sent events, from bytes to events. Pure; it takes any cut of the bytes."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field


class MalformedStream(ValueError):
    """What came is not an event stream."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `name` is "message" where the stream named none."""

    name: str
    data: str = field(repr=False)


class EventParser:
    """Feed it bytes as they come; it yields the events that they complete. Comments are dropped.

    `max_bytes` bounds an unfinished event: what sends more of it is not a node (MalformedStream).
    """

    def __init__(self, max_bytes: int = 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that `chunk` completes. Raises MalformedStream."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > self._max_bytes:
            raise MalformedStream("a line has no end")
        for line in lines:
            # A byte order mark belongs to no field.
            event = self._line((line if self._begun else line.removeprefix(BOM_UTF8)).removesuffix(b"\r"))
            self._begun = True
            if event is not None:
                yield event

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        try:
            name, _, value = line.decode().partition(":")
        except UnicodeDecodeError:
            raise MalformedStream("an event is not UTF-8") from None
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
            self._size += len(line)
            if self._size > self._max_bytes:
                raise MalformedStream("an event has no end")
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._size = "", [], 0
        return event
