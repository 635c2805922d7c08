"""Reads a reply as it comes, whole or streamed, for every view of it: events, and the bytes themselves. No I/O."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from backend_client.errors import NPUError
from backend_client.http.answers import form_value
from backend_client.http.messages import Costs, NotAnAnswer, Reply, Request, costs, encode, joules, read_whole
from backend_client.http.routes import ROUTES, hides_usage
from backend_client.http.stream_forms import (
    INFERENCE,
    LINES,
    SSE,
    STREAMS,
    Event,
    EventParser,
    Json,
    StreamEvent,
    StreamForm,
    failure_in,
    read_event,
    usage_of,
)
from backend_client.results import Attempt, Origin, RawReply, Usage, origin_fields

_NO_USAGE = b',"usage":null'
# An unfinished event of more is not a node's.
_LONGEST_EVENT = 4 * 1024 * 1024
# As nodes read the field of a form.
_TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
# What callers get of the headers of a node or a cloud: what the reply is, and who made it. The request's id, cookies,
# redirects and what browsers may do are for the caller's own server to say.
_PASSED_ON = frozenset({
    "content-type", "content-disposition", "retry-after", "retry-after-ms", "x-should-retry", "x-model", "x-space",
    "x-shape", "traceparent", "tracestate", "server-timing",
})  # fmt: skip


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a reply that are for callers."""
    return {
        name: value
        for name, value in headers.items()
        if (lower := name.lower()) in _PASSED_ON
        or (lower.startswith(("x-npu-", "openai-")) and not lower.startswith("x-npu-gateway-"))
    }


def asks_for_stream(request: Request) -> bool:
    """Whether the reply is a stream, as far as the request says."""
    route, body = ROUTES[request.path], request.body
    if route.upload:
        return form_value(body, "stream").lower() in _TRUE and form_value(body, "response_format") in {
            "",
            "json",
            "text",
        }
    stream = body.get("stream")
    return route.streams if stream is None else bool(stream)


def asking_for_usage(path: str, body: Mapping[str, Any], content: bytes) -> bytes:
    """The content of a request that also asks for the usage of its stream: `ReplyReader` hides what comes of that."""
    if not hides_usage(path, body) or not body.get("stream") or not isinstance(body.get("stream_options"), dict | None):
        return content
    options = {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
    if "stream_options" in body or b"\0" in content[:4]:
        # Repeated names and other encodings than UTF-8 are not for every reader.
        return json.dumps(json.loads(content) | options).encode()
    return content.rstrip()[:-1] + b"," + json.dumps(options).encode()[1:]


class TokenCount:
    """The tokens of one reply: those that it says it used; until it does, about those of the prompt and of its text.

    `joules` are those that it says, if it does.
    """

    def __init__(self, prompt: int = 0, energy: float | None = None) -> None:
        self._prompt = prompt
        self.joules = energy
        self._written = 0
        self._said = Usage(0)
        self.complete = False

    @property
    def usage(self) -> Usage:
        said = self._said
        written = said.completion_tokens if self.complete else max(said.completion_tokens, self._written)
        return Usage(said.prompt_tokens or self._prompt, written or self._written)

    def read(self, data: Mapping[str, Any]) -> None:
        """Read what a body, or a part of it, says."""
        prompt, completion = usage_of(data)
        self._said = Usage(prompt or self._said.prompt_tokens, completion or self._said.completion_tokens)
        self.joules = joules(data.get("joules")) or self.joules

    def write(self, text: str) -> None:
        """Count a part of the answer: most are one token, and longer ones have some four letters each."""
        self._written += max(1, len(text) // 4)


def tokens_of_prompt(body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt, or the messages, of a request have."""
    messages = body.get("messages")
    rows = [row for row in messages if isinstance(row, dict)] if isinstance(messages, list) else []
    for row in list(rows):
        content = row.get("content")
        rows += [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [body.get("prompt"), *(row.get(name) for row in rows for name in ("content", "text"))]
    return sum(max(1, len(text) // 4) for text in texts if isinstance(text, str))


class ReplyReader:
    """Reads and checks one reply as it comes: whether the answer has `begun`, `ended`, or failed (`failure`).

    `events` and `content` are what came since they were taken: the events that were read, and with `as_bytes` the bytes
    for a caller of the same dialect. A usage that this caller did not ask for (`asking_for_usage`) is taken out of
    them. Without it the reply must be a stream of the `form`. `said` is the last JSON that names costs, and `texts` are
    those of all events. `check` is called with the head, if it has come, and JSON that may name a model and a device.
    """

    def __init__(
        self, request: Request, form: StreamForm | None, check: Callable[..., None], *, as_bytes: bool
    ) -> None:
        self._request = request
        self._form = form
        self._read_event = form.reader(request.body) if form else None
        self._check = check
        self.as_bytes = as_bytes
        self._hides_usage = as_bytes and hides_usage(request.path, request.body)
        self._parser = EventParser(_LONGEST_EVENT)
        self._rest = b""
        self.begun = self.ended = False
        self.failure: Json | None = None
        self.failed: NPUError | None = None
        self.head = Reply(200, {})
        self.costs = Costs()
        self.events: list[StreamEvent] = []
        self.content = b""
        self.said: Json = {}
        self.texts: list[str] = []
        self.count = TokenCount()

    def begin(self, head: Reply) -> Any:
        """Read the head of a stream, or a whole reply: returns what the route's check reads in that.

        Raises NotAnAnswer, also for a stream that was not asked for, or of another form than the route's.
        """
        self.head = head
        self.costs = costs(head.headers)
        # Of a recording it is not the tokens of a prompt.
        self.count = TokenCount(0 if ROUTES[self._request.path].upload else self.costs.tokens, self.costs.joules)
        kind = head.headers.get("content-type", "").partition(";")[0].strip()
        if kind in STREAMS:
            asked = not self.as_bytes or ROUTES[self._request.path].upload or asks_for_stream(self._request)
            if self._form is None or kind != (LINES if self._form.lines else SSE) or not asked:
                raise NotAnAnswer("the reply is a stream that was not asked for, or of another form than its route's")
            self._check(head.headers)
            return None
        if not self.as_bytes:
            raise NotAnAnswer("the reply is not an event stream")
        data, found = read_whole(ROUTES[self._request.path].check, self._request, head)
        self.begun = self.ended = self.count.complete = True
        self.content = head.body
        self._check(head.headers, data)
        self._note_costs(data)
        return found

    def feed(self, chunk: bytes) -> bool:
        """Read more of a stream; returns whether there was an event, and not only comments.

        Raises NotAnAnswer, and as `check`; what came before the fault can be taken.
        """
        before = len(self.texts)
        if not self.as_bytes:
            for event in self._parser.feed(chunk):
                self._read(event)
            return len(self.texts) > before
        lines = self._form is not None and self._form.lines
        complete, found, self._rest = (self._rest + chunk).rpartition(b"\n" if lines else b"\n\n")
        if len(self._rest) > _LONGEST_EVENT:
            raise NotAnAnswer("an event of the stream has no end")
        # A block is one event, or a comment.
        for block in complete.split(found) if found else ():
            line = [Event("message", _text(block))] if lines and block.strip() else []
            shown = [self._read(event) for event in (line if lines else self._parser.feed(block + found))]
            if all(shown):
                self.content += (block.replace(_NO_USAGE, b"") if self._hides_usage else block) + found
        return len(self.texts) > before

    def close(self) -> bool:
        """Read the end of the stream; returns whether the answer is complete: not all servers send its last event."""
        last = self._form.closed(self._read_event) if self._form is not None and self._read_event is not None else None
        if last is not None and not self.ended:
            self.begun = self.ended = self.count.complete = True
            self.events.append(last)
        return self.ended

    def take_events(self) -> list[StreamEvent]:
        taken, self.events = self.events, []
        return taken

    def take_content(self) -> list[bytes]:
        taken, self.content = self.content, b""
        return [taken] if taken else []

    def _read(self, event: Event) -> bool:
        """Whether the event is for the caller."""
        if self._form is None or self._read_event is None or self.ended or self.failure is not None:
            return True
        if self._form is INFERENCE and event.name not in INFERENCE.NAMES:
            return True
        found = read_event(event)
        self.failure = failure_in(found)
        if self.failure is not None:
            return True
        found = self._read_event(found)
        data = found.data or {}
        response, message = data.get("response"), data.get("message")
        within = response if isinstance(response, dict) else message if data.get("type") == "message_start" else data
        self._check(None, data, within)
        self._note_costs(within)
        begins, self.ended = self._form.begins(found), self._form.ends(found)
        self.begun |= begins or self.ended
        self.count.complete = self.ended
        if begins and not self.ended:
            self.count.write(found.text)
        self.texts.append(found.text)
        if not self.as_bytes:
            self.events.append(found)
        return not (self._hides_usage and found.only_usage)

    def _note_costs(self, data: Any) -> None:
        if isinstance(data, dict):
            self.count.read(data)
            if isinstance(data.get("usage"), dict) or self.ended:
                self.said = data


def _text(block: bytes) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError:
        raise NotAnAnswer("a line of the stream is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A reply for a caller of the same dialect: `content` whole, or its stream as it comes.

    `attempts` are those of the call; that of a stream is the last of them, and there once it has ended. So are the
    tokens that it says it used, which `count` knows.
    """

    headers: Mapping[str, str]
    origin: Origin
    attempts: list[Attempt]
    count: TokenCount
    content: bytes | AsyncGenerator[bytes, None]

    @classmethod
    def whole(cls, reply: RawReply) -> Forwarded:
        """A reply that was read whole, as JSON."""
        count = TokenCount()
        count.read({"usage": asdict(reply.usage)})
        count.complete = True
        headers = {**passed_on(reply.headers), "content-type": "application/json"}
        return cls(headers, Origin(**origin_fields(reply)), list(reply.attempts), count, encode(reply.body))

    def origin_now(self) -> Origin:
        """Who answered, with the attempts so far."""
        return replace(self.origin, attempts=tuple(self.attempts))
