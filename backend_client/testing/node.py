"""One scripted node: it answers as nodes do, except where its script says otherwise. No I/O."""

from __future__ import annotations

import email.parser
import email.policy
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from backend_client._protocol.images import writing_kind
from backend_client.testing import answers
from backend_client.testing.answers import EMBEDDER, LISTENER, RERANKER, VIEWER, WORD, WRITER, Answer
from backend_client.testing.steps import Sent, Step

_KIND_OF = {
    "/embeddings": "embedding",
    "/inference": "generation",
    "/v1/chat/completions": "generation",
    "/tokenize": "generation",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
}
PATHS = tuple(_KIND_OF)
_INVALID = "invalid_request"
_MODELS = {
    "embedding": EMBEDDER,
    "generation": WRITER,
    "vision": VIEWER,
    "rerank": RERANKER,
    "transcription": LISTENER,
}


class FakeNode:
    """`answer` is the text of all generations, or a function of the request's body; `space` that of its vectors.

    `tool_call` is the name and the arguments of a tool call that answers chats with tools; `transcript` is the text of
    all recordings; `offers` are the kinds of models that it has. The model of kind vision takes chats with images.
    """

    def __init__(self, record: Callable[[Sent], None], dimensions: int) -> None:
        self.url = ""
        self.space = "fake-space"
        self.answer: str | Callable[[Mapping[str, Any]], str] = "The capital is Paris."
        self.tool_call: tuple[str, Mapping[str, Any]] | None = None
        self.transcript = "It is raining in Paris."
        self.health_status = "ready"
        self.offers = set(_MODELS)
        self._record = record
        self._dimensions = dimensions
        self._steps: deque[Step | None] = deque()

    def script(self, *steps: Step | None) -> None:
        """What to do with the next requests, one after another; None answers one. Afterwards all are answered."""
        self._steps.extend(steps)

    def clear(self) -> None:
        """Forget the steps that are left."""
        self._steps.clear()

    def health(self) -> Answer:
        """The reply of /health."""
        common: dict[str, Any] = {"state": "ready", "device": "CPU", "placements": ["CPU"], "context_limit": 8192}
        models = [{"id": name, "kind": kind, **common} for kind, name in _MODELS.items() if kind in self.offers]
        for model in models:
            if model["kind"] == "embedding":
                model |= {"dimensions": self._dimensions, "space": self.space}
        serving = self.health_status in {"ready", "degraded"}
        body = {"status": self.health_status, "version": "fake", "models": models if serving else []}
        return answers.json_answer(body, status=200 if serving else 503)

    def take(self, path: str, headers: Mapping[str, str], content: bytes) -> tuple[Step | None, Answer]:
        """A request: its step, and the reply, which a step may keep from the caller."""
        given = {name.lower(): value for name, value in headers.items()}
        step, answer = self._take(path, given, content)
        repeated = {"X-Request-ID": given["x-request-id"]} if "x-request-id" in given else {}
        return step, replace(answer, headers={**answer.headers, **repeated})

    def _take(self, path: str, given: Mapping[str, str], content: bytes) -> tuple[Step | None, Answer]:
        try:
            body = _form(given["content-type"], content) if path.startswith("/v1/audio/") else json.loads(content)
        except (KeyError, ValueError):
            return None, answers.refusal(Step("status", 400, _INVALID))
        self._record(Sent(self.url, path, body, given))
        step = self._steps.popleft() if self._steps else None
        if step is not None and step.kind == "status":
            return step, answers.refusal(step)
        try:
            kind = self._kind(path, body)
            model = body.get("model") or _MODELS[kind]
            if kind not in self.offers and not (kind == "vision" and "generation" in self.offers):
                return step, answers.refusal(Step("status", 404, "model_not_found"))
            if model != _MODELS[kind] and (model, kind) != (VIEWER, "generation"):
                # A model that reads no images refuses them.
                wrong = model == WRITER and kind == "vision"
                return step, answers.refusal(Step("status", *((400, _INVALID) if wrong else (404, "model_not_found"))))
            return step, self._answer(path, body, model)
        except (KeyError, TypeError, AttributeError):
            # A field is missing, or of another type.
            return step, answers.refusal(Step("status", 400, _INVALID))

    def _kind(self, path: str, body: Mapping[str, Any]) -> str:
        """The kind of model that answers where the body names none."""
        if _KIND_OF[path] != "generation":
            return _KIND_OF[path]
        return writing_kind(body) if "generation" in self.offers else "vision"

    def _answer(self, path: str, body: Mapping[str, Any], model: str) -> Answer:
        if path == "/embeddings":
            wanted = body.get("dimensions", self._dimensions)
            space = self.space if wanted == self._dimensions else f"{self.space}-{wanted}"
            return answers.vectors(body["texts"], wanted, space)
        if path == "/inference":
            return answers.generation(model, body["prompt"], self._pieces(body))
        if path == "/v1/chat/completions":
            return self._chat(body, model)
        if path in {"/v1/rerank", "/v2/rerank"}:
            return answers.ranking(body["query"], body["documents"], body.get("top_n"))
        if path.startswith("/v1/audio/"):
            language = None if body.get("stream") == "true" else body.get("language", "english")
            return answers.transcript(self.transcript, language)
        text = body.get("prompt") or json.dumps(body.get("messages"))
        return answers.json_answer({"count": len(WORD.findall(text)), "max_model_len": 8192})

    def _chat(self, body: Mapping[str, Any], model: str) -> Answer:
        if self.tool_call is not None and body.get("tools"):
            name, arguments = self.tool_call
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"index": 0, "id": "call_fake", "type": "function", "function": function}
            return answers.chat(model, body["messages"], [{"tool_calls": [call]}], "tool_calls")
        return answers.chat(model, body["messages"], [{"content": piece} for piece in self._pieces(body)], "stop")

    def _pieces(self, body: Mapping[str, Any]) -> list[str]:
        text = self.answer if isinstance(self.answer, str) else self.answer(body)
        return WORD.findall(text) or [text]


def _form(content_type: str, content: bytes) -> dict[str, Any]:
    """The fields of a multipart form: texts, lists of texts where the name ends with `[]`, and the file's bytes."""
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    form = parser.parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + content)
    fields: dict[str, Any] = {}
    for part in form.iter_parts():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        if not isinstance(name, str):
            continue
        if part.get_filename() is not None:
            fields[name] = data
        elif name.endswith("[]"):
            fields.setdefault(name, []).append(data.decode())
        else:
            fields[name] = data.decode()
    return fields
