"""The streams of the routes: when an answer begins, ends or fails, and its whole. No I/O."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from backend_client.http.answers import (
    chats_asked,
    check_ends,
    check_generation,
    check_ollama_part,
    completions_asked,
    reading,
)
from backend_client.http.messages import NotAnAnswer, read_json
from backend_client.results import RawReply

Json = dict[str, Any]
DONE = "[DONE]"
SSE, LINES = "text/event-stream", "application/x-ndjson"
STREAMS = frozenset({SSE, LINES})
_TEXT_DELTAS = frozenset({"response.output_text.delta", "transcript.text.delta"})


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `name` is "message" where the stream named none."""

    name: str
    data: str = field(repr=False)


class EventParser:
    """Feed it bytes as they come; it yields the events that they complete. Comments are dropped.

    `max_bytes` bounds an unfinished event: what sends more of it is not a node (NotAnAnswer).
    """

    def __init__(self, max_bytes: int = 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that `chunk` completes. Raises NotAnAnswer."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > self._max_bytes:
            raise NotAnAnswer("a line has no end")
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
            raise NotAnAnswer("an event is not UTF-8") from None
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
            self._size += len(line)
            if self._size > self._max_bytes:
                raise NotAnAnswer("an event has no end")
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._size = "", [], 0
        return event


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream; `data` is its JSON, None for `[DONE]`."""

    name: str
    data: Json | None = field(repr=False)

    @property
    def text(self) -> str:
        """The text that it adds to the first answer; "" for none."""
        if self.data is None:
            return ""
        if self.name == "token":
            found = self.data.get("text")
        elif self.data.get("type") in _TEXT_DELTAS:
            found = self.data.get("delta")
        elif self.data.get("type") == "content_block_delta":
            found = _object(self.data.get("delta")).get("text")
        elif "choices" in self.data:
            choice = _first_choice(self.data)
            found = choice.get("text") or _object(choice.get("delta")).get("content")
        else:
            # Ollama's.
            found = self.data.get("response") or _object(self.data.get("message")).get("content")
        return found if isinstance(found, str) else ""

    @property
    def finish_reason(self) -> str:
        """Why the first answer ends with it; "" where it does not."""
        return finish_reason_in(self.data)

    @property
    def only_usage(self) -> bool:
        """Whether it says what the answer used, and nothing else."""
        return self.data is not None and self.data.get("choices") == [] and self.data.get("usage") is not None

    def encode(self) -> bytes:
        head = "" if self.name == "message" else f"event: {self.name}\n"
        data = DONE if self.data is None else json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))
        return f"{head}data: {data}\n\n".encode(errors="replace")


Read: TypeAlias = Callable[[StreamEvent], StreamEvent]


class StreamForm(ABC):
    """How the streams of one route are read.

    `lines`: they are lines of JSON, which have no comments, and no server-sent events.
    """

    lines = False

    def reader(self, request: Mapping[str, Any]) -> Read:  # noqa: ARG002  (for those whose streams depend on it)
        """Reads the events of the stream that answers a request: returns each as callers get it.

        Raises NotAnAnswer for one whose parts are not what they must be, and for an end before the answer is complete.
        """
        return self.read

    def read(self, event: StreamEvent) -> StreamEvent:
        """See `reader`, of routes whose streams are all read alike."""
        return event

    @abstractmethod
    def begins(self, event: StreamEvent) -> bool:
        """Whether the event has a part of the answer: after it there is no second attempt."""

    @abstractmethod
    def ends(self, event: StreamEvent) -> bool:
        """Whether it is the last event of a complete answer."""

    def closed(self, read: Read) -> StreamEvent | None:  # noqa: ARG002  (for those whose answers end before the stream)
        """The last event of a stream that was closed without it; None where the answer is not complete."""
        return None


class WholeForm(StreamForm):
    """A form of which a request can be asked, and whose streams can be put together."""

    def request(self, body: Mapping[str, Any]) -> Json:
        """The body that asks for a stream with its usage."""
        return {**body, "stream": True}

    @abstractmethod
    def whole(self, events: Sequence[StreamEvent]) -> Json:
        """The reply that a request without a stream gets, from all the events that a reader returned."""


class ChunkForm(WholeForm):
    """Chunks with `choices`: chat completions, and completions of a prompt (`kind` text_completion)."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def reader(self, request: Mapping[str, Any]) -> Read:
        """Every choice, delta and call is an object, every text is one, and every choice that was asked for ends with a
        reason and has nothing after it.
        """
        return _Chunks((chats_asked if self._kind == "chat.completion" else completions_asked)(request)).read

    def begins(self, event: StreamEvent) -> bool:
        """A chunk with text, reasoning, a tool call, or a finish reason."""
        return event.data is None or any(
            choice.get("finish_reason") or _adds(choice) for choice in _objects(event.data.get("choices"))
        )

    def ends(self, event: StreamEvent) -> bool:
        return event.data is None

    def closed(self, read: Read) -> StreamEvent | None:
        """`[DONE]` where every choice has ended: not every server sends it."""
        try:
            return read(StreamEvent("message", None))
        except NotAnAnswer:
            return None

    def request(self, body: Mapping[str, Any]) -> Json:
        """With `stream_options.include_usage`."""
        options = body.get("stream_options")
        if options is None or isinstance(options, dict):
            options = {**(options or {}), "include_usage": True}
        # Anything else is for the node to refuse.
        return {**body, "stream": True, "stream_options": options}

    def whole(self, events: Sequence[StreamEvent]) -> Json:
        reply: Json = {}
        choices: dict[int, Json] = {}
        for event in events:
            data = event.data or {}
            for name, value in data.items():
                if name not in {"choices", "object"} and value is not None:
                    reply[name] = value
            for part in _objects(data.get("choices")):
                self._add(choices, part)
        reply["object"] = self._kind
        reply["choices"] = [self._finished(choices[index]) for index in sorted(choices)]
        return reply

    def _add(self, choices: dict[int, Json], part: Json) -> None:
        index = part.get("index") or 0
        choice = choices.setdefault(index, {"index": index, "finish_reason": None, "logprobs": None, "parts": []})
        choice["parts"].append(part)
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        for name, values in _object(part.get("logprobs")).items():
            if isinstance(values, list):
                joined = choice["logprobs"] = choice["logprobs"] or {}
                joined[name] = [*(joined.get(name) or []), *values]

    def _finished(self, choice: Json) -> Json:
        parts = choice.pop("parts")
        if self._kind == "text_completion":
            return {**choice, "text": "".join(part.get("text") or "" for part in parts)}
        deltas = [_object(part.get("delta")) for part in parts]
        calls = _calls(deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
        message: Json = {"role": "assistant", "content": None if calls and not content.strip() else content}
        message["refusal"] = None
        if reasoning := "".join(delta.get("reasoning_content") or "" for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {**choice, "message": message}


class _Chunks:
    """What the chunks of one stream have said so far: how its `count` choices ended, whether they call tools, and the
    names of these.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends: dict[int, tuple[str | None, bool]] = {}
        self._names: dict[tuple[int, int], str] = {}

    def read(self, event: StreamEvent) -> StreamEvent:
        if event.data is None:
            check_ends([(index, *end) for index, end in self._ends.items()], self._count)
            if not all(self._names.values()):
                raise NotAnAnswer("a tool call has no name")
            return event
        choices = event.data.get("choices")
        if not _all(choices, _valid_choice):
            raise NotAnAnswer("an event of the stream is not a part of an answer")
        for choice in choices or ():
            self._read(choice)
        return event

    def _read(self, choice: Json) -> None:
        index, reason = choice.get("index") or 0, choice.get("finish_reason") or None
        if not 0 <= index < self._count:
            raise NotAnAnswer(f"an event has the choice {index} of {self._count}")
        ended, called = self._ends.get(index, (None, False))
        if ended and (_adds(choice) or reason not in {None, ended}):
            raise NotAnAnswer("the answer went on after its finish_reason")
        calls = (choice.get("delta") or {}).get("tool_calls") or ()
        self._ends[index] = reason or ended, called or bool(calls)
        for call in calls:
            if call.get("function") is not None:
                self._name(index, call)

    def _name(self, index: int, call: Json) -> None:
        """Drop a name that the server repeats in each event: callers join the parts of a name."""
        place = index, call.get("index") or 0
        function = call["function"]
        known = self._names.setdefault(place, "")
        if function.get("name") == known:
            del function["name"]
        else:
            self._names[place] += function.get("name") or ""


class ResponsesForm(WholeForm):
    """Events of /v1/responses: the last one holds the whole response."""

    _ENDS = frozenset({"response.completed", "response.incomplete"})
    _BEFORE = frozenset({"response.created", "response.in_progress", "response.queued"})

    def read(self, event: StreamEvent) -> StreamEvent:
        if event.data is None:
            raise NotAnAnswer("the stream ended before the response was complete")
        kind = event.data.get("type")
        if kind in self._ENDS and not isinstance(event.data.get("response"), dict):
            raise NotAnAnswer("the last event has no response")
        if kind == "response.output_text.delta" and not isinstance(event.data.get("delta"), str):
            raise NotAnAnswer("a delta of text is not text")
        return event

    def begins(self, event: StreamEvent) -> bool:
        return event.data is not None and event.data.get("type") not in self._BEFORE

    def ends(self, event: StreamEvent) -> bool:
        return event.data is not None and event.data.get("type") in self._ENDS

    def whole(self, events: Sequence[StreamEvent]) -> Json:
        return _object((events[-1].data or {}).get("response"))


class InferenceForm(WholeForm):
    """Events of the nodes' own /inference: `token` with a text, `done`, and `error`.

    A newer node may send events of other names: they are skipped, whatever their data.
    """

    NAMES = frozenset({"token", "done", "error"})

    def read(self, event: StreamEvent) -> StreamEvent:
        if event.name == "token" and not isinstance((event.data or {}).get("text"), str):
            raise NotAnAnswer("a token event in the stream has no text")
        if event.name == "done":
            check_generation(event.data)
        return event

    def begins(self, event: StreamEvent) -> bool:
        """A token, or the end of an empty answer."""
        return event.name == "done" or bool(event.text)

    def ends(self, event: StreamEvent) -> bool:
        return event.name == "done"

    def whole(self, events: Sequence[StreamEvent]) -> Json:
        return {**(events[-1].data or {}), "text": "".join(event.text for event in events)}


class TranscriptForm(WholeForm):
    """Events of /v1/audio/transcriptions with `stream`; events of other types are handed on."""

    _DELTA, _DONE = "transcript.text.delta", "transcript.text.done"

    def read(self, event: StreamEvent) -> StreamEvent:
        data = event.data or {}
        name = {self._DELTA: "delta", self._DONE: "text"}.get(str(data.get("type")))
        if name is not None and not isinstance(data.get(name), str):
            raise NotAnAnswer("a part of the transcription is not text")
        return event

    def begins(self, event: StreamEvent) -> bool:
        """A delta, or the whole text of a recording without speech."""
        return event.data is not None and event.data.get("type") in {self._DELTA, self._DONE}

    def ends(self, event: StreamEvent) -> bool:
        """The whole text: a form has no `[DONE]` after it."""
        return event.data is not None and event.data.get("type") == self._DONE

    def request(self, body: Mapping[str, Any]) -> Json:
        # The form asks for the stream itself.
        return dict(body)

    def whole(self, events: Sequence[StreamEvent]) -> Json:
        return {"text": (events[-1].data or {})["text"]}


class MessagesForm(StreamForm):
    """Events of Anthropic's /v1/messages."""

    def read(self, event: StreamEvent) -> StreamEvent:
        with reading("an event of a message"):
            data = event.data or {}
            if not isinstance(data["type"], str):
                raise TypeError
            for name in {"message_start": ("message",), "content_block_delta": ("delta",)}.get(data["type"], ()):
                if not isinstance(data[name], dict):
                    raise TypeError
        return event

    def begins(self, event: StreamEvent) -> bool:
        return (event.data or {}).get("type") in {"content_block_delta", "message_delta", "message_stop"}

    def ends(self, event: StreamEvent) -> bool:
        return (event.data or {}).get("type") == "message_stop"


class OllamaForm(StreamForm):
    """Lines of Ollama's /api/chat and /api/generate."""

    lines = True

    def read(self, event: StreamEvent) -> StreamEvent:
        with reading("a part of an answer"):
            check_ollama_part(event.data or {})
        return event

    def begins(self, event: StreamEvent) -> bool:
        return event.data is not None

    def ends(self, event: StreamEvent) -> bool:
        return (event.data or {}).get("done") is True


CHAT, COMPLETION, RESPONSES = ChunkForm("chat.completion"), ChunkForm("text_completion"), ResponsesForm()
INFERENCE, TRANSCRIPTS, MESSAGES, OLLAMA = InferenceForm(), TranscriptForm(), MessagesForm(), OllamaForm()
EventStream: TypeAlias = AsyncGenerator[StreamEvent | RawReply, None]
"""Events as they come; the last item is who answered, with the usage and without a body."""


def read_event(event: Event) -> StreamEvent:
    """Raises NotAnAnswer for data that is not a JSON object."""
    if event.data.strip() == DONE:
        return StreamEvent(event.name, None)
    data = read_json(event.data)
    if not isinstance(data, dict):
        raise NotAnAnswer("an event of the stream is not an object")
    return StreamEvent(event.name, data)


def failure_in(event: StreamEvent) -> Json | None:
    """The error object of an event that reports a failure, in the form of error replies; else None."""
    data = event.data or {}
    if event.name == "error" and "error" not in data and "type" not in data:
        return {"error": None}
    kind = data.get("type")
    if isinstance(kind, str) and kind == "response.failed":
        return {"error": _object(data.get("response")).get("error")}
    if kind == "error" and "error" not in data:
        return {"error": data}
    return data if data.get("error") is not None and not str(kind).startswith("response.") else None


def finish_reason_in(data: Json | None) -> str:
    """Why the first answer of a reply, or of a part of it, ended; "" where it does not say."""
    found = (data or {}).get("finish_reason") or _first_choice(data or {}).get("finish_reason")
    return found if isinstance(found, str) else ""


def usage_of(body: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens in and out that a reply of any dialect names, 0 for what it does not."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        # Ollama's.
        return _count(body.get("prompt_eval_count")), _count(body.get("eval_count"))
    # A ranking has no output, and says its total alone.
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", usage.get("total_tokens")))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    # Anthropic's `input_tokens` leave out what the cache had.
    cache = _count(usage.get("cache_read_input_tokens")) + _count(usage.get("cache_creation_input_tokens"))
    return _count(prompt) + cache, _count(completion)


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0


def _first_choice(data: Json) -> Json:
    return next((choice for choice in _objects(data.get("choices")) if not choice.get("index")), {})


def _calls(deltas: Iterable[Json]) -> list[Json]:
    calls: dict[int, Json] = {}
    for delta in deltas:
        for part in _objects(delta.get("tool_calls")):
            call = calls.setdefault(
                part.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.get("id") or call["id"]
            function = _object(part.get("function"))
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
    return [calls[index] for index in sorted(calls)]


def _adds(choice: Json) -> bool:
    """Whether a choice of an event has a part of the answer."""
    delta = _object(choice.get("delta"))
    return bool(choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")))


def _valid_choice(choice: Json) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return _typed(choice, index=int, text=str, finish_reason=str)
    return (
        _typed(choice, index=int, delta=dict, finish_reason=str)
        and _typed(delta, content=str, reasoning_content=str)
        and _all(delta.get("tool_calls"), _valid_call)
    )


def _valid_call(call: Json) -> bool:
    return _typed(call, index=int, id=str, function=dict) and _typed(
        call.get("function") or {}, name=str, arguments=str
    )


def _typed(value: Json, **kinds: type) -> bool:
    """Whether what is there of these fields is of these types."""
    return all((found := value.get(name)) is None or type(found) is kind for name, kind in kinds.items())


def _all(value: object, valid: Callable[[Json], bool]) -> bool:
    """Whether it is missing, or a list of valid objects."""
    if value is None:
        return True
    return isinstance(value, list) and all(isinstance(item, dict) and valid(item) for item in value)


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
