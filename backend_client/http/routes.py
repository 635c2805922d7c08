"""The routes of inference: one table, from which clients, the gateway and its telemetry know what a path is. No I/O.

A request goes to a path of this table or is refused: no text of a caller is ever a part of a path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from backend_client.http import answers, stream_forms
from backend_client.http.messages import ModelKind, Request, plain_texts, writing_kind
from backend_client.http.stream_forms import StreamForm, WholeForm

Dialect = Literal["openai", "anthropic", "ollama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path. Its errors are in the form of `dialect`, and `operation` is its name in telemetry.

    `check` reads a whole reply, given the request; it raises NotAnAnswer. `kind`: the models that serve it; None: those
    that write text. `form`: how it is streamed, if it is; `streams`: it is unless the request says otherwise.
    `loads_without`: a request without any of these fields only loads its model. `upload`: a form with a file. `sdk`:
    the SDK over a fleet may call it, and `post` unless it is an upload. `cloud`: the cloud can take it over. `cuts`: a
    request may ask for the `dimensions` of its vectors. `usage_if_asked`: a stream says its tokens only where
    `stream_options` ask for them. `on_device`: its replies name the device that made them.
    """

    operation: str
    check: Callable[[Mapping[str, Any], Any], Any]
    kind: ModelKind | None = None
    dialect: Dialect = "openai"
    form: StreamForm | None = None
    streams: bool = False
    loads_without: tuple[str, ...] = ()
    upload: bool = False
    sdk: bool = False
    cloud: bool = False
    cuts: bool = False
    usage_if_asked: bool = False
    on_device: bool = True

    def kind_of(self, body: Mapping[str, Any]) -> ModelKind:
        return self.kind or writing_kind(body)

    def form_of(self, request: Request) -> WholeForm | None:
        """The form in which to ask for the answer; None where it comes whole. Recordings choose themselves."""
        asked = not self.upload or bool(request.body.get("stream"))
        return self.form if asked and isinstance(self.form, WholeForm) else None


_CHAT = Route(
    operation="chat", check=answers.completion_in, form=stream_forms.CHAT, sdk=True, cloud=True, usage_if_asked=True
)
_AUDIO = Route(
    operation="transcribe",
    check=answers.transcript_in,
    kind="transcription",
    form=stream_forms.TRANSCRIPTS,
    upload=True,
    sdk=True,
)

ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": Route(
        operation="text_completion", check=answers.text_choices, form=stream_forms.COMPLETION, sdk=True,
        usage_if_asked=True,
    ),
    "/v1/responses": Route(operation="chat", check=answers.response_in, form=stream_forms.RESPONSES, sdk=True),
    "/v1/messages": Route(
        operation="chat", check=answers.message_in, dialect="anthropic", form=stream_forms.MESSAGES
    ),
    "/v1/messages/count_tokens": Route(
        operation="tokenize",
        check=lambda _, body: answers.count_in(body, "input_tokens"),
        dialect="anthropic",
        on_device=False,
    ),
    "/api/chat": Route(
        operation="chat", check=answers.ollama_answer, dialect="ollama", form=stream_forms.OLLAMA, streams=True,
        loads_without=("messages",),
    ),
    "/api/generate": Route(
        operation="chat", check=answers.ollama_answer, dialect="ollama", form=stream_forms.OLLAMA, streams=True,
        loads_without=("prompt", "images"),
    ),
    "/inference": Route(operation="chat", check=answers.generation_in, form=stream_forms.INFERENCE, cloud=True),
    "/tokenize": Route(
        operation="tokenize", check=lambda _, body: answers.count_in(body), sdk=True, on_device=False
    ),
    "/detokenize": Route(operation="detokenize", check=answers.prompt_in, sdk=True, on_device=False),
    "/v1/embeddings": Route(
        operation="embeddings", check=answers.openai_vectors, kind="embedding", sdk=True, cuts=True
    ),
    "/embeddings": Route(
        operation="embeddings", check=partial(answers.plain_vectors, "texts"), kind="embedding", cuts=True
    ),
    "/api/embed": Route(
        operation="embeddings", check=partial(answers.plain_vectors, "input"), kind="embedding", dialect="ollama",
        cuts=True,
    ),
    "/api/embeddings": Route(
        operation="embeddings", check=answers.single_vector, kind="embedding", dialect="ollama"
    ),
    "/v1/rerank": Route(operation="rerank", check=answers.ranked_texts, kind="rerank", sdk=True),
    "/v2/rerank": Route(operation="rerank", check=answers.ranked_texts, kind="rerank", sdk=True),
    "/rerank": Route(operation="rerank", check=answers.ranked_texts, kind="rerank"),
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
}  # fmt: skip


def runs_on_device(request: Request) -> bool:
    """Whether a device runs the request, which its reply then names."""
    route = ROUTES[request.path]
    only_loads = route.loads_without and not any(request.body.get(field) for field in route.loads_without)
    return route.on_device and not only_loads


def hides_usage(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a stream says its tokens only if it is asked to, and the request does not ask."""
    options = body.get("stream_options")
    return ROUTES[path].usage_if_asked and not (isinstance(options, dict) and options.get("include_usage"))


def dimensions_asked(request: Request) -> int | None:
    """The length of vectors that a request asks for; Ollama's clients send 0 for the model's own."""
    asked = request.body.get("dimensions")
    return asked if ROUTES[request.path].cuts and type(asked) is int and asked > 0 else None


def texts_to_embed(request: Request) -> list[str] | None:
    """The texts of a request for their vectors that asks for nothing else; None for any other."""
    if request.path == "/embeddings":
        texts = request.body.get("texts")
        return texts if isinstance(texts, list) else None
    return plain_texts(request.body) if request.path == "/v1/embeddings" else None


def only_on_nodes(request: Request) -> str | None:
    """Why no cloud serves a request, or None."""
    if request.local_only:
        return "local_only is set"
    if request.require_device is not None:
        return f"the call requires the device {request.require_device}"
    if ROUTES[request.path].cloud or texts_to_embed(request) is not None:
        return None
    if request.path == "/v1/embeddings":
        return "of /v1/embeddings it serves texts without other fields only: call embed or embed_many"
    return f"it serves chats and embeddings only, and this is {request.path}"
