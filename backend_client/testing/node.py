"""Scripted servers, and the node among them: answers, what is done instead of answering, and what was sent."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from backend_client.errors import RequestRejected
from backend_client.http.messages import plain_name, read_form
from backend_client.http.routes import ROUTES
from backend_client.http.stream_forms import CHAT, INFERENCE, StreamEvent, WholeForm


@dataclass(frozen=True, slots=True)
class Step:
    """What is done with one request instead of answering it; see `status`, `drop`, `hang` and `cut`."""

    kind: Literal["status", "drop", "hang", "cut"]
    status: int = 503
    code: str = ""
    retry_after: float | None = None
    after: int = 0


def status(http: int, code: str = "internal_error", *, retry_after: float | None = None) -> Step:
    """Answer with this status and code; `retry_after` in seconds."""
    return Step("status", http, code, retry_after)


def drop() -> Step:
    """Close the connection without an answer."""
    return Step("drop")


def hang() -> Step:
    """Never answer."""
    return Step("hang")


def cut(after: int) -> Step:
    """Break a stream off after this many pieces."""
    return Step("cut", after=after)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that a node, or the cloud, at the URL `node` got. The names of its headers are in lower case."""

    node: str
    path: str
    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


# The answers of scripted nodes, as bytes and events: the same over sockets and in memory.

EMBEDDER, RERANKER, LISTENER = "fake-embedder", "fake-reranker", "fake-listener"
WRITER, VIEWER = "fake-writer", "fake-viewer"
SPACE = "fake-space"
WORD = re.compile(r"\S+\s*")


def fake_vector(text: str, dimensions: int = 8) -> npt.NDArray[np.float32]:
    """The vector that fake nodes give a text: float32 (dimensions,) of length 1, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big")
    vector = np.random.default_rng(seed).standard_normal(dimensions)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: with `events` a stream (name and data; None is `[DONE]`), else whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    events: Sequence[tuple[str, Any]] | None = field(default=None, repr=False)


def event_bytes(name: str, data: Any) -> bytes:
    text = "[DONE]" if data is None else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def route_headers(model: str) -> dict[str, str]:
    """What the headers of every answer say."""
    return {"X-Model": model, "X-NPU-Node-Device": "CPU", "X-NPU-Node-Route-Reason": "fake"}


def json_answer(body: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> Answer:
    return Answer(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode())


def refusal(step: Step) -> Answer:
    """The reply that a step says."""
    waits = {} if step.retry_after is None else {"retry-after-ms": str(int(step.retry_after * 1000))}
    error = {"message": "scripted", "type": "scripted", "code": step.code, "param": None}
    return json_answer({"error": error}, waits, status=step.status)


NOT_FOUND = refusal(Step("status", 404, "not_found"))


def vectors(model: str, rows: Sequence[npt.ArrayLike], dimensions: int, space: str) -> Answer:
    headers = {"Content-Type": "application/octet-stream", "X-Shape": f"{len(rows)},{dimensions}", "X-Space": space}
    return Answer(200, {**headers, **route_headers(model)}, np.array(rows, "<f4").tobytes())


def generation(model: str, prompt: str, pieces: Sequence[str]) -> Answer:
    usage = {"prompt_tokens": len(WORD.findall(prompt)), "completion_tokens": len(pieces)}
    end = {"model": model, "device": "CPU", "finish_reason": "stop", "usage": usage}
    return _stream([*(("token", {"text": piece}) for piece in pieces), ("done", end)], model)


def chat(model: str, deltas: Sequence[Mapping[str, Any]], reason: str, usage: Mapping[str, int] | None) -> Answer:
    """A streamed chat, with a last chunk for the usage where there is one."""
    head = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": model}
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    chunks: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in choices]
    if usage is not None:
        chunks.append({**head, "choices": [], "usage": usage})
    return _stream([*(("", chunk) for chunk in chunks), ("", None)], model)


def put_together(stream: Answer, form: WholeForm) -> Answer:
    """The reply that a request without a stream gets."""
    events = [StreamEvent(name or "message", data) for name, data in stream.events or ()]
    return json_answer(form.whole(events), {**stream.headers, "Content-Type": "application/json"})


def ranking(model: str, query: str, documents: Sequence[Any], top_n: int | None) -> Answer:
    """The reply of /v1/rerank: the score of a document is the share of the query's words that it has."""
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    wanted = set(query.lower().split())
    scores = [len(wanted & set(text.lower().split())) / max(1, len(wanted)) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]
    results = [{"index": index, "relevance_score": scores[index]} for index in order]
    tokens = sum(len(WORD.findall(text)) for text in [query, *texts])
    body = {"id": "rerank-fake", "model": model, "results": results, "usage": {"total_tokens": tokens}}
    return json_answer(body, route_headers(model))


def transcript(text: str, language: str | None) -> Answer:
    """The reply of /v1/audio/transcriptions: verbose_json in which each word takes half a second, or without a language
    a stream with a delta for each word.
    """
    if language is None:
        return _transcript_events(text)
    found = [word.strip() for word in WORD.findall(text)]
    words = [{"word": word, "start": index / 2, "end": index / 2 + 0.5} for index, word in enumerate(found)]
    segments = [{"id": 0, "start": 0.0, "end": len(words) / 2, "text": text}]
    body = {"text": text, "language": language, "duration": len(words) / 2, "segments": segments, "words": words}
    return json_answer(body, route_headers(LISTENER))


def _transcript_events(text: str) -> Answer:
    events = [{"type": "transcript.text.delta", "delta": word} for word in WORD.findall(text)]
    usage = {"type": "duration", "seconds": len(events)}
    events.append({"type": "transcript.text.done", "text": text, "usage": usage})
    return _stream([("", event) for event in events], LISTENER)


def _stream(events: Iterable[tuple[str, Any]], model: str) -> Answer:
    return Answer(200, {"Content-Type": "text/event-stream", **route_headers(model)}, events=list(events))


# Scripted servers, without I/O.

PATHS = (
    "/embeddings", "/inference", "/v1/chat/completions", "/tokenize", "/v1/rerank", "/v2/rerank",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
_INVALID = "invalid_request"


def model_row(kind: str | None) -> dict[str, Any]:
    """A model on /health, without its id."""
    return {"kind": kind, "state": "ready", "device": "CPU", "placements": ["CPU"], "context_limit": 8192}


_MODELS = {
    "embedding": EMBEDDER,
    "generation": WRITER,
    "vision": VIEWER,
    "rerank": RERANKER,
    "transcription": LISTENER,
}


class Scripted(ABC):
    """A server that answers requests to its `paths`, except where its script says otherwise. No I/O."""

    paths: tuple[str, ...] = ()

    def __init__(self, record: Callable[[Sent], None]) -> None:
        self.url = ""
        self._record = record
        self._steps: deque[Step | None] = deque()

    def script(self, *steps: Step | None) -> None:
        """What to do with the next requests, one after another; None answers one. Afterwards all are answered."""
        self._steps.extend(steps)

    def clear(self) -> None:
        """Forget the steps that are left."""
        self._steps.clear()

    def get(self, path: str) -> Answer:  # noqa: ARG002
        """The reply to a GET."""
        return NOT_FOUND

    def take(self, path: str, headers: Mapping[str, str], content: bytes) -> tuple[Step | None, Answer]:
        """A request: its step, and the reply, which a step may keep from the caller."""
        given = {name.lower(): value for name, value in headers.items()}
        step, answer = self._take(path, given, content)
        repeated = {"X-Request-ID": given["x-request-id"]} if "x-request-id" in given else {}
        return step, replace(answer, headers={**answer.headers, **repeated})

    def _take(self, path: str, given: Mapping[str, str], content: bytes) -> tuple[Step | None, Answer]:
        try:
            body = _form(given["content-type"], content) if ROUTES[path].upload else json.loads(content)
        except (KeyError, ValueError, RequestRejected):
            return None, refusal(Step("status", 400, _INVALID))
        self._record(Sent(self.url, path, body, given))
        step = self._steps.popleft() if self._steps else None
        if step is not None and step.kind == "status":
            return step, refusal(step)
        try:
            return step, self._reply(path, body)
        except (KeyError, TypeError, AttributeError):
            # A field is missing, or of another type.
            return step, refusal(Step("status", 400, _INVALID))

    @abstractmethod
    def _reply(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a body. Raises KeyError, TypeError or AttributeError for one that is invalid."""


class FakeNode(Scripted):
    """`answer` is the text of all generations, or a function of the request's body; `space` that of its vectors.

    `tool_call` is the name and the arguments of a tool call that answers chats with tools; `transcript` is the text of
    all recordings; `offers` are the kinds of models that it has. The model of kind vision takes chats with images.
    `models` are the rows of /health by id; `vector` makes the vector of a text, given its length and its space.
    """

    paths = PATHS

    def __init__(self, record: Callable[[Sent], None], dimensions: int) -> None:
        super().__init__(record)
        self.models = {name: model_row(kind) for kind, name in _MODELS.items()}
        self.models[EMBEDDER] |= {"dimensions": dimensions, "space": SPACE}
        self.vector: Callable[[str, int, str], npt.ArrayLike] = lambda text, length, _: fake_vector(text, length)
        self.answer: str | Callable[[Mapping[str, Any]], str] = "The capital is Paris."
        self.tool_call: tuple[str, Mapping[str, Any]] | None = None
        self.transcript = "It is raining in Paris."
        self.health_status = "ready"
        self.offers = set(_MODELS)

    @property
    def space(self) -> str:
        """The vector space of its own embedding model."""
        return str(self.models[EMBEDDER]["space"])

    @space.setter
    def space(self, space: str) -> None:
        self.models[EMBEDDER]["space"] = space

    def get(self, path: str) -> Answer:
        return self.health() if path == "/health" else NOT_FOUND

    def health(self) -> Answer:
        """The reply of /health."""
        models = [{"id": name, **row} for name, row in self._offered().items()]
        body = {"status": self.health_status, "version": "fake", "models": models}
        return json_answer(body, status=200 if self.health_status in {"ready", "degraded"} else 503)

    def _reply(self, path: str, body: Mapping[str, Any]) -> Answer:
        kind = ROUTES[path].kind_of(body)
        model = self._model(kind, body.get("model"))
        if model is None:
            return refusal(Step("status", 404, "model_not_found"))
        if (kind, self.models[model]["kind"]) == ("vision", "generation"):
            # A model that reads no images refuses them.
            return refusal(Step("status", 400, _INVALID))
        return self._answer(path, body, model)

    def _offered(self) -> dict[str, dict[str, Any]]:
        return {name: row for name, row in self.models.items() if row["kind"] is None or row["kind"] in self.offers}

    def _model(self, kind: str, asked: str | None) -> str | None:
        """The model that answers: the one with that name or alias, or the first of its kind; None: there is none."""
        written = {"generation", "vision"}
        fitting = {
            name: row for name, row in self._offered().items() if row["kind"] == kind or {row["kind"], kind} <= written
        }
        if asked is not None:
            known = {name: (name, *row.get("aliases", ())) for name, row in fitting.items()}
            return next((name for name in known if plain_name(asked) in map(plain_name, known[name])), None)
        return min(fitting, key=lambda name: fitting[name]["kind"] != kind, default=None)

    def _answer(self, path: str, body: Mapping[str, Any], model: str) -> Answer:
        if path == "/embeddings":
            whole, space = self.models[model]["dimensions"], self.models[model]["space"]
            length = body.get("dimensions", whole)
            space = space if length == whole else f"{space}-{length}"
            return vectors(model, [self.vector(text, length, space) for text in body["texts"]], length, space)
        if path == "/inference":
            answer = generation(model, body["prompt"], self._pieces(body))
            return answer if body.get("stream") else put_together(answer, INFERENCE)
        if path == "/v1/chat/completions":
            answer = self._chat(body, model)
            return answer if body.get("stream") else put_together(answer, CHAT)
        if path in {"/v1/rerank", "/v2/rerank"}:
            return ranking(model, body["query"], body["documents"], body.get("top_n"))
        if path.startswith("/v1/audio/"):
            language = None if body.get("stream") == "true" else body.get("language", "english")
            return transcript(self.transcript, language)
        text = body.get("prompt") or json.dumps(body.get("messages"))
        return json_answer({"count": len(WORD.findall(text)), "max_model_len": 8192})

    def _chat(self, body: Mapping[str, Any], model: str) -> Answer:
        if self.tool_call is not None and body.get("tools"):
            name, arguments = self.tool_call
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"index": 0, "id": "call_fake", "type": "function", "function": function}
            deltas: list[dict[str, Any]] = [{"tool_calls": [call]}]
        else:
            deltas = [{"content": piece} for piece in self._pieces(body)]
        prompt, written = len(WORD.findall(json.dumps(body["messages"]))), len(deltas)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        return chat(model, deltas, "tool_calls" if "tool_calls" in deltas[0] else "stop", usage)

    def _pieces(self, body: Mapping[str, Any]) -> list[str]:
        text = self.answer if isinstance(self.answer, str) else self.answer(body)
        return WORD.findall(text) or [text]


def _form(content_type: str, content: bytes) -> dict[str, Any]:
    """The fields of a multipart form: texts, lists of texts where the name ends with `[]`, and the file's bytes."""
    fields, (_, recording) = read_form(content, content_type)
    texts = {name: values if name.endswith("[]") else values[-1] for name, values in fields.items()}
    return {**texts, "file": recording}
