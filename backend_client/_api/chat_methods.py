"""The methods of a client that speak of conversations and documents, in OpenAI's names and shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel

from backend_client._api import arguments
from backend_client._api.chat_reply import ChatItems, chat_items, chat_result, origin_fields
from backend_client._api.client_base import ClientBase
from backend_client._api.schema import is_model, model_class, response_format
from backend_client._api.token_stream import ChatStream
from backend_client._protocol import wire
from backend_client._protocol.jobs import Exchange, split_options
from backend_client._resilience.threads import in_daemon_thread
from backend_client.errors import BadReply, InvalidArgument
from backend_client.results import (
    CallOptions,
    ChatOptions,
    ChatResult,
    RankedDocument,
    RawReply,
    RerankOptions,
    RerankResult,
    TranscribeOptions,
    Transcription,
)

M = TypeVar("M", bound=BaseModel)
Messages = Sequence[Mapping[str, Any] | BaseModel]
"""OpenAI's messages: dicts, or the SDK's own objects."""

_CHAT = "/v1/chat/completions"
_RAW_PATHS = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/rerank or /tokenize"


class ChatMethods(ClientBase):
    """Chats, token counts, reranking, transcription, and requests in OpenAI's dialect as they are."""

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """The answer to a conversation.

        `messages` are OpenAI's, with text and image parts. With a pydantic model as `response_format` the answer is
        validated and in `parsed`. Raises InvalidAnswer when it does not validate.
        """
        job, schema = self._chat_job("chat", messages, options)
        return chat_result(await self._core.backend.exchange(job), schema)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """The answer to a conversation, delta by delta; `result` is there after the last.

        Raises StreamInterrupted, which holds the text so far, when the answer stops after its first delta.
        """
        job, schema = self._chat_job("stream_chat", messages, options)

        async def opened() -> ChatItems:
            return chat_items(await self._core.backend.open_exchange(job), schema)

        return ChatStream(opened)

    async def parse(self, messages: Messages, schema: type[M], **options: Unpack[ChatOptions]) -> M:
        """The answer to a conversation as an object of a pydantic model.

        Raises InvalidAnswer, which holds the text, when it does not validate or the model called a tool instead.
        """
        job, _ = self._chat_job("parse", messages, {**options, "response_format": model_class(schema)})
        result = chat_result(await self._core.backend.exchange(job), schema)
        if isinstance(result.parsed, schema):
            return result.parsed
        raise arguments.no_answer(schema.__name__, result)

    async def count_tokens(self, messages: Messages | str, **options: Unpack[CallOptions]) -> int:
        """How many tokens a conversation, or a prompt as it stands, has for the model."""
        given = self._given("count_tokens", options, CallOptions)
        if isinstance(messages, str):
            body: dict[str, Any] = {"prompt": arguments.text(messages, "messages")}
        else:
            body = {"messages": arguments.messages(messages)}
        reply = await self._exchange("/tokenize", body, given, self._core.options.timeouts.embed)
        count = reply.body.get("count") if isinstance(reply.body, dict) else None
        if not isinstance(count, int):
            raise BadReply("the reply has no count: this is not a node's /tokenize", node=reply.node)
        return count

    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> RerankResult:
        """The documents by their relevance to the query. Raises NotOffered where no node has a model for it."""
        given = self._given("rerank", options, RerankOptions)
        texts = arguments.text_list(documents)
        body: dict[str, Any] = {"query": arguments.text(query, "query"), "documents": texts}
        if "top_n" in given:
            body["top_n"] = given.pop("top_n")
        reply = await self._exchange("/v1/rerank", body, given, self._core.options.timeouts.embed, kind="rerank")
        ranked = None
        with contextlib.suppress(TypeError, KeyError, ValueError):
            ranked = tuple(
                RankedDocument(int(row["index"]), float(row["relevance_score"])) for row in reply.body["results"]
            )
        if ranked is None or any(not 0 <= document.index < len(texts) for document in ranked):
            raise BadReply("the reply has no valid results: this is not a node's /v1/rerank", node=reply.node)
        return RerankResult(documents=ranked, usage=reply.usage, **origin_fields(reply))

    async def transcribe(self, audio: str | Path | bytes, **options: Unpack[TranscribeOptions]) -> Transcription:
        """The text of a recording: a file's path, or its bytes. Raises NotOffered where no node has a model for it."""
        given = self._given("transcribe", options, TranscribeOptions)
        name, content = await _recording(audio)
        common, fields = split_options(given)
        job = Exchange(
            path="/v1/audio/transcriptions",
            kind="transcription",
            deadline=self._deadline(given, self._core.options.timeouts.generate),
            body={field: str(value) for field, value in fields.items()},
            file=(name, content),
            **common,
        )
        reply = await self._core.backend.exchange(job)
        text = reply.body.get("text") if isinstance(reply.body, dict) else None
        if not isinstance(text, str):
            raise BadReply("the reply has no text: this is not a node's /v1/audio/transcriptions", node=reply.node)
        return Transcription(text=text, **origin_fields(reply))

    async def post(self, path: str, body: Mapping[str, Any], **options: Unpack[CallOptions]) -> RawReply:
        """A request in OpenAI's dialect as it is, and the reply with its headers.

        `body` may name its model itself. Routing, retries, the deadline and the check of vector spaces are those of the
        other calls. Raises InvalidArgument for a path that is no inference.
        """
        given = self._given("post", options, CallOptions)
        kinds = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank"}
        if path not in {_CHAT, "/v1/completions", "/v1/responses", "/tokenize", *kinds}:
            raise InvalidArgument(f"path is none of {_RAW_PATHS}", param="path")
        if not isinstance(body, Mapping):
            raise InvalidArgument(f"body is {type(body).__name__}, not a mapping", param="body")
        rest = {name: value for name, value in body.items() if name not in {"model", "stream"}}
        if body.get("stream"):
            raise InvalidArgument("post() does not stream: call stream_chat", param="stream")
        if isinstance(body.get("model"), str):
            given.setdefault("model", body["model"])
        return await self._exchange(
            path, rest, given, self._core.options.timeouts.generate, kind=kinds.get(path, "generation")
        )

    async def _exchange(
        self, path: str, body: Mapping[str, Any], given: Mapping[str, Any], timeout: float, *, kind: Any = "generation"
    ) -> RawReply:
        common, _ = split_options(given)
        job = Exchange(path=path, kind=kind, deadline=self._deadline(given, timeout), body=body, **common)
        wire.encode(body)
        return await self._core.backend.exchange(job)

    def _chat_job(
        self, method: str, messages: Messages, options: Mapping[str, Any]
    ) -> tuple[Exchange, type[BaseModel] | None]:
        given = self._given(method, options, ChatOptions)
        common, body = split_options(given)
        schema = None
        if is_model(body.get("response_format")):
            schema = model_class(body["response_format"])
            body["response_format"] = response_format(schema)
        body["messages"] = arguments.messages(messages)
        wire.encode(body)
        deadline = self._deadline(given, self._core.options.timeouts.generate)
        return Exchange(path=_CHAT, deadline=deadline, body=body, **common), schema


async def _recording(audio: object) -> tuple[str, bytes]:
    """The name and the bytes of a recording. Raises InvalidArgument."""
    if isinstance(audio, bytes | bytearray):
        return "audio", bytes(audio)
    if not isinstance(audio, str | Path):
        raise InvalidArgument(f"audio is {type(audio).__name__}, not a path or bytes", param="audio")
    path = Path(audio)
    try:
        return path.name, await in_daemon_thread(path.read_bytes, f"read {path.name}")
    except OSError as error:
        why = error.strerror
    raise InvalidArgument(f"audio cannot be read: {why}", param="audio")
