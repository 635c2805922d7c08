"""The answers of scripted nodes, as bytes and events: the same over sockets and in memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from backend_client.testing.steps import Step

EMBEDDER, RERANKER, LISTENER = "fake-embedder", "fake-reranker", "fake-listener"
WRITER, VIEWER = "fake-writer", "fake-viewer"
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
    """One event of a stream."""
    text = "[DONE]" if data is None else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def route_headers(model: str) -> dict[str, str]:
    """What the headers of every answer say."""
    return {"X-Model": model, "X-NPU-Node-Device": "CPU", "X-NPU-Node-Route-Reason": "fake"}


def json_answer(body: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> Answer:
    """A reply that is JSON."""
    return Answer(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode())


def refusal(step: Step) -> Answer:
    """The reply that a step says."""
    waits = {} if step.retry_after is None else {"retry-after-ms": str(int(step.retry_after * 1000))}
    error = {"message": "scripted", "type": "scripted", "code": step.code, "param": None}
    return json_answer({"error": error}, waits, status=step.status)


NOT_FOUND = refusal(Step("status", 404, "not_found"))


def vectors(texts: Sequence[str], dimensions: int, space: str) -> Answer:
    """The reply of /embeddings."""
    rows = np.array([fake_vector(text, dimensions) for text in texts], "<f4").reshape(len(texts), dimensions)
    headers = {"Content-Type": "application/octet-stream", "X-Shape": f"{len(texts)},{dimensions}", "X-Space": space}
    return Answer(200, {**headers, **route_headers(EMBEDDER)}, rows.tobytes())


def generation(model: str, prompt: str, pieces: Sequence[str]) -> Answer:
    """The reply of /inference."""
    usage = {"prompt_tokens": len(WORD.findall(prompt)), "completion_tokens": len(pieces)}
    end = {"model": model, "device": "CPU", "finish_reason": "stop", "usage": usage}
    return _stream([*(("token", {"text": piece}) for piece in pieces), ("done", end)], model)


def chat(model: str, messages: Any, deltas: Sequence[Mapping[str, Any]], reason: str) -> Answer:
    """The reply of /v1/chat/completions."""
    head = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": model}
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    prompt, written = len(WORD.findall(json.dumps(messages))), len(deltas)
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    chunks = [*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": usage}]
    return _stream([*(("", chunk) for chunk in chunks), ("", None)], model)


def ranking(query: str, documents: Sequence[Any], top_n: int | None) -> Answer:
    """The reply of /v1/rerank: the score of a document is the share of the query's words that it has."""
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    wanted = set(query.lower().split())
    scores = [len(wanted & set(text.lower().split())) / max(1, len(wanted)) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]
    results = [{"index": index, "relevance_score": scores[index]} for index in order]
    tokens = sum(len(WORD.findall(text)) for text in [query, *texts])
    body = {"id": "rerank-fake", "model": RERANKER, "results": results, "usage": {"total_tokens": tokens}}
    return json_answer(body, route_headers(RERANKER))


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
