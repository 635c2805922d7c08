"""A node's replies on their way to a caller of the same dialect: read, and their bytes unchanged. No I/O."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backend_client.http.answers import form_value
from backend_client.http.messages import Exchange, NotAnAnswer, Reply, costs
from backend_client.http.routes import ROUTES, read_whole
from backend_client.http.sse import Event, EventParser, MalformedStream
from backend_client.http.stream_forms import INFERENCE, StreamEvent, failure_in, read_event, usage_of
from backend_client.results import Attempt, Origin, Usage

_SSE, _LINES = "text/event-stream", "application/x-ndjson"
STREAMS = frozenset({_SSE, _LINES})
# Their usage comes only if it is asked for.
_CHUNKS = frozenset({"/v1/chat/completions", "/v1/completions"})
_NO_USAGE = b',"usage":null'
# An unfinished event of more is not a node's.
_LONGEST_EVENT = 4 * 1024 * 1024
# As nodes read the field of a form.
_TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
_CODES = {401: "invalid_api_key", 404: "model_not_found", 413: "payload_too_large"}
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


def asks_for_stream(job: Exchange) -> bool:
    """Whether the reply is a stream, as far as the request says."""
    route, body = ROUTES[job.path], job.body or {}
    if route.upload:
        return form_value(body, "stream").lower() in _TRUE and form_value(body, "response_format") in {
            "",
            "json",
            "text",
        }
    stream = body.get("stream")
    return route.streams if stream is None else bool(stream)


def asking_for_usage(path: str, body: Mapping[str, Any], content: bytes) -> bytes:
    """The content of a request that also asks for the usage of its stream: `StreamWatch` hides what comes of that."""
    if not _hides_usage(path, body):
        return content
    options = {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
    if "stream_options" in body or b"\0" in content[:4]:
        # Repeated names and other encodings than UTF-8 are not for every reader.
        return json.dumps(json.loads(content) | options).encode()
    return content.rstrip()[:-1] + b"," + json.dumps(options).encode()[1:]


def _hides_usage(path: str, body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options") or {}
    return (
        path in _CHUNKS and bool(body.get("stream")) and isinstance(options, dict) and not options.get("include_usage")
    )


def in_our_words(reply: Reply, path: str) -> Reply:
    """A node's refusal in another dialect than OpenAI's as that one would say it, to be understood."""
    if ROUTES[path].dialect == "openai" or not 400 <= reply.status < 500:
        return reply
    try:
        found = json.loads(reply.body)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return reply
    text = found.get("message") if isinstance(found, dict) else found
    code = "context_length_exceeded" if "prompt is too long" in str(text) else None
    fields = {"message": "", "type": "", "code": code or _CODES.get(reply.status, "invalid_request"), "param": None}
    return Reply(reply.status, reply.headers, json.dumps({"error": fields}).encode())


class StreamWatch:
    """Reads a reply as it comes: whether the answer has `begun`, `ended`, or failed (`failure`), and its `usage`.

    `parts` is the JSON that came last: the body, or the events of the last bytes. `texts` are those of a stream so far.
    A usage that the caller did not ask for (`asking_for_usage`) is taken out.
    """

    def __init__(self, job: Exchange) -> None:
        self._job = job
        self._form = ROUTES[job.path].form
        self._check: Callable[[StreamEvent], StreamEvent] | None = (
            self._form.reader(job.body or {}) if self._form else None
        )
        self._parser = EventParser(_LONGEST_EVENT)
        self._rest = b""
        self.begun = self.ended = False
        self.failure: Mapping[str, Any] | None = None
        self.parts: list[Any] = []
        self.texts: list[str] = []
        self._said = Usage(0)
        self._hides_usage = _hides_usage(job.path, job.body or {})
        self._prompt = self._written = 0

    @property
    def usage(self) -> Usage:
        """The tokens that the reply says it used; until it does, those of the prompt and of what was passed on."""
        said = self._said
        written = said.completion_tokens if self.ended else max(said.completion_tokens, self._written)
        return Usage(said.prompt_tokens or self._prompt, written or self._written)

    def streamed(self, head: Reply) -> bool:
        """Whether the reply is a stream, by its head. Raises NotAnAnswer for one of another form than the route's."""
        kind = head.headers.get("content-type", "").partition(";")[0].strip()
        if kind not in STREAMS:
            return False
        asked = ROUTES[self._job.path].upload or asks_for_stream(self._job)
        if self._form is None or kind != (_LINES if self._form.lines else _SSE) or not asked:
            raise NotAnAnswer("the reply is a stream that was not asked for, or of another form than its route's")
        self._count_prompt(head)
        return True

    def whole(self, reply: Reply) -> Any:
        """Read a reply that came whole; returns what the route's check reads in it. Raises NotAnAnswer."""
        self.begun = self.ended = True
        data, found = read_whole(self._job, reply)
        self.parts = [data]
        self._count_prompt(reply)
        self._count(data)
        return found

    def feed(self, chunk: bytes) -> bytes:
        """Read more of a stream; returns the bytes of what is complete now. Raises NotAnAnswer."""
        lines = self._form is not None and self._form.lines
        complete, found, self._rest = (self._rest + chunk).rpartition(b"\n" if lines else b"\n\n")
        self.parts = []
        if len(self._rest) > _LONGEST_EVENT:
            raise NotAnAnswer("an event of the stream has no end")
        if not found:
            return b""
        kept = b""
        try:
            # A block is one event, or a comment.
            for block in complete.split(found):
                line = [Event("message", block.decode())] if lines and block.strip() else []
                shown = [self._event(event) for event in (line if lines else self._parser.feed(block + found))]
                if all(shown):
                    kept += (block.replace(_NO_USAGE, b"") if self._hides_usage else block) + found
        except (MalformedStream, UnicodeDecodeError) as error:
            raise NotAnAnswer(str(error)) from None
        return kept

    def close(self) -> None:
        """Note the end of the stream: the answer may be complete without its last event."""
        if self._form is not None and self._check is not None:
            self.ended |= self._form.closed(self._check) is not None

    def _event(self, event: Event) -> bool:
        """Whether the event is for the caller."""
        if self._form is None or self._check is None:
            return True
        if self._form is INFERENCE and event.name not in INFERENCE.NAMES:
            return True
        found = read_event(event)
        self.failure = failure_in(found)
        if self.failure is not None:
            return True
        found = self._check(found)
        data = found.data or {}
        response, message = data.get("response"), data.get("message")
        within = response if isinstance(response, dict) else message if data.get("type") == "message_start" else data
        self.parts += [data, within]
        self._count(within)
        self.texts.append(found.text)
        self.begun |= self._form.begins(found) or self._form.ends(found)
        self.ended |= self._form.ends(found)
        if self._form.begins(found) and not self.ended:
            self._written += tokens_of(found.text)
        return not (self._hides_usage and data.get("choices") == [] and data.get("usage") is not None)

    def _count_prompt(self, head: Reply) -> None:
        """Count the prompt as the head of a reply does: some bodies say nothing of it."""
        # Of a recording it is not the tokens of a prompt.
        self._prompt = 0 if ROUTES[self._job.path].upload else costs(head.headers)[0]

    def _count(self, data: Any) -> None:
        if not isinstance(data, dict):
            return
        prompt, completion = usage_of(data)
        said = data.get("usage")
        if isinstance(said, dict) and "prompt_tokens" not in said:
            prompt, completion = _number(said, "input_tokens"), _number(said, "output_tokens")
        prompt = prompt or _number(data, "prompt_eval_count")
        completion = completion or _number(data, "eval_count")
        self._said = Usage(prompt or self._said.prompt_tokens, completion or self._said.completion_tokens)


def tokens_of(text: str) -> int:
    """About how many tokens a part of an answer has: most are one, and longer ones have some four letters each."""
    return max(1, len(text) // 4)


def _number(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    return value if type(value) is int and value >= 0 else 0


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A node's reply for a caller of the same dialect: `content` whole, or its stream as it comes.

    `attempts` are those of the call; that of a stream is the last of them, and there once it has ended. So are the
    tokens that it says it used, which `watch` knows.
    """

    head: Reply
    origin: Origin
    attempts: list[Attempt]
    watch: StreamWatch
    content: bytes | AsyncGenerator[bytes, None]
