"""A node's replies on their way to a caller of the same dialect: read, and their bytes unchanged. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backend_client.http.answers import read_answer, read_json
from backend_client.http.messages import Exchange, NotAnAnswer, Reply, Vectors, check_vectors, embed_reply
from backend_client.http.sse import Event, EventParser, MalformedStream
from backend_client.http.stream_forms import FORMS, INFERENCE, TRANSCRIPTS, failure_in, read_event, usage_of
from backend_client.results import Usage

_SSE, _LINES = "text/event-stream", "application/x-ndjson"
STREAMS = frozenset({_SSE, _LINES})
_OLLAMA_STREAMS = frozenset({"/api/chat", "/api/generate"})
_MESSAGES = "/v1/messages"
# An unfinished event of more is not a node's.
_LONGEST_EVENT = 4 * 1024 * 1024
_CODES = {401: "invalid_api_key", 404: "model_not_found", 413: "payload_too_large"}


def asks_for_stream(job: Exchange) -> bool:
    """Whether the reply is a stream: Ollama's are, unless the request says otherwise."""
    stream = (job.body or {}).get("stream")
    return job.path in _OLLAMA_STREAMS if stream is None else bool(stream)


def in_our_words(reply: Reply, path: str) -> Reply:
    """A node's refusal in another dialect than OpenAI's as that one would say it, to be understood."""
    if not path.startswith(("/api/", _MESSAGES)) or not 400 <= reply.status < 500:
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
    """Reads a reply as it comes: whether the answer has `begun`, `ended`, or failed (`failure`), and its `usage`."""

    def __init__(self, job: Exchange) -> None:
        self._path = job.path
        self._body = job.body or {}
        self._texts = _texts(job)
        known = {**FORMS, "/inference": INFERENCE, "/v1/audio/transcriptions": TRANSCRIPTS}
        self._form = known.get(job.path)
        self._check: Callable[[Any], Any] | None = self._form.reader(self._body) if self._form else None
        self._parser = EventParser(_LONGEST_EVENT)
        self._rest = b""
        self._separator = b"\n\n"
        self.begun = self.ended = False
        self.failure: Mapping[str, Any] | None = None
        self.usage = Usage(0)

    def streamed(self, head: Reply) -> bool:
        """Whether the reply is a stream, by its head."""
        kind = head.headers.get("content-type", "").partition(";")[0].strip()
        if kind == _LINES:
            self._separator = b"\n"
        return kind in STREAMS

    def whole(self, reply: Reply) -> int:
        """Read a reply that came whole; returns the dimensions of its vectors, 0 for none. Raises NotAnAnswer."""
        self.begun = self.ended = True
        if self._path == "/embeddings" and "x-shape" in reply.headers:
            vectors, _, (tokens, _) = embed_reply("", reply, self._texts or 0)
            self.usage = Usage(tokens)
            return int(vectors.shape[1])
        if "json" not in reply.headers.get("content-type", ""):
            return 0
        data = read_json(reply.body)
        self._count(data)
        found = read_answer(self._path, self._body, data)
        if not isinstance(found, np.ndarray):
            found = _vectors(self._path, data, self._texts)
        return 0 if found is None else int(found.shape[1])

    def feed(self, chunk: bytes) -> bytes:
        """Read more of a stream; returns the bytes of what is complete now. Raises NotAnAnswer."""
        complete, found, self._rest = (self._rest + chunk).rpartition(self._separator)
        if len(self._rest) > _LONGEST_EVENT:
            raise NotAnAnswer("an event of the stream has no end")
        if not found:
            return b""
        complete += found
        if self._separator == b"\n":
            for line in complete.split(b"\n"):
                if line.strip():
                    self._line(line)
        else:
            try:
                for event in self._parser.feed(complete):
                    self._event(event)
            except MalformedStream as error:
                raise NotAnAnswer(str(error)) from None
        return complete

    def _line(self, line: bytes) -> None:
        data = read_json(line)
        if not isinstance(data, dict):
            raise NotAnAnswer("a line of the stream is not a JSON object")
        if "error" in data:
            self.failure = {"error": {}}
            return
        self.begun = True
        self._count(data)
        self.ended = data.get("done") is True

    def _event(self, event: Event) -> None:
        if self._path == _MESSAGES:
            data = read_json(event.data)
            if not isinstance(data, dict):
                raise NotAnAnswer("an event of the stream is not a JSON object")
            kind = data.get("type")
            if kind == "error":
                self.failure = {"error": {}}
            self.begun |= kind in {"content_block_delta", "message_delta", "message_stop"}
            self.ended |= kind == "message_stop"
            self._count(data.get("message") if kind == "message_start" else data)
            return
        if self._form is None or (self._form is INFERENCE and event.name not in INFERENCE.NAMES):
            return
        found = read_event(event)
        self.failure = failure_in(found)
        if self.failure is not None or self._check is None:
            return
        found = self._check(found)
        data = found.data or {}
        self._count(data.get("response") if isinstance(data.get("response"), dict) else data)
        self.begun |= self._form.begins(found) or self._form.ends(found)
        self.ended |= self._form.ends(found)

    def _count(self, data: Any) -> None:
        if not isinstance(data, dict):
            return
        prompt, completion = usage_of(data)
        said = data.get("usage")
        if isinstance(said, dict) and "prompt_tokens" not in said:
            prompt, completion = _number(said, "input_tokens"), _number(said, "output_tokens")
        prompt = prompt or _number(data, "prompt_eval_count")
        completion = completion or _number(data, "eval_count")
        self.usage = Usage(prompt or self.usage.prompt_tokens, completion or self.usage.completion_tokens)


def _number(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    return value if type(value) is int and value >= 0 else 0


def _texts(job: Exchange) -> int | None:
    """How many texts are to be embedded; None if the request does not say."""
    body = job.body or {}
    for name in ("texts", "input", "prompt"):
        if isinstance(given := body.get(name), str):
            return 1
        if isinstance(given, list):
            return len(given)
    return None


def _vectors(path: str, data: Any, count: int | None) -> Vectors | None:
    """The vectors of a reply in Ollama's or the nodes' own form; None for another route. Raises NotAnAnswer."""
    if path not in {"/api/embed", "/api/embeddings", "/embeddings"}:
        return None
    try:
        rows = [data["embedding"]] if path == "/api/embeddings" else data["embeddings"]
        vectors = np.asarray(rows, np.float32)
    except (KeyError, TypeError, ValueError):
        raise NotAnAnswer("the reply is not a list of embeddings") from None
    if vectors.ndim != 2:
        raise NotAnAnswer("not one vector of the same length for each text")
    return check_vectors(vectors, count)
