"""The methods of a client that speak of conversations, in OpenAI's names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel

from backend_client._api import arguments
from backend_client._api.chat_reply import ChatItems, chat_items, chat_result
from backend_client._api.client_base import ClientBase
from backend_client._api.schema import is_model, model_class, response_format
from backend_client._api.token_stream import ChatStream
from backend_client._protocol import wire
from backend_client._protocol.answers import count_in
from backend_client._protocol.images import writing_kind
from backend_client._protocol.jobs import Exchange, split_options
from backend_client._protocol.report import ModelKind
from backend_client.errors import InvalidArgument
from backend_client.results import (
    CallOptions,
    ChatOptions,
    ChatResult,
    RawReply,
)

M = TypeVar("M", bound=BaseModel)
Messages = Sequence[Mapping[str, Any] | BaseModel]
"""OpenAI's messages: dicts, or the SDK's own objects."""

_CHAT = "/v1/chat/completions"
_RAW_PATHS = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/rerank or /tokenize"


class ChatMethods(ClientBase):
    """Chats, token counts, and requests in OpenAI's dialect as they are."""

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
        seconds = self._core.options.timeouts.embed
        return count_in((await self._exchange("/tokenize", body, given, seconds)).body)

    async def post(self, path: str, body: Mapping[str, Any], **options: Unpack[CallOptions]) -> RawReply:
        """A request in OpenAI's dialect as it is, and the reply with its headers.

        `body` may name its model itself, which goes before the default of `with_options`. Routing, retries, the
        deadline and the check of vector spaces are those of the other calls. Raises InvalidArgument for a path that is
        no inference.
        """
        kinds: dict[str, ModelKind] = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank"}
        if path not in {_CHAT, "/v1/completions", "/v1/responses", "/tokenize", *kinds}:
            raise InvalidArgument(f"path is none of {_RAW_PATHS}", param="path")
        if not isinstance(body, Mapping):
            raise InvalidArgument(f"body is {type(body).__name__}, not a mapping", param="body")
        rest = {name: value for name, value in body.items() if name not in {"model", "stream"}}
        if body.get("stream"):
            raise InvalidArgument("post() does not stream: call stream_chat", param="stream")
        if options.get("model") is None:
            options["model"] = body.get("model")
        given = self._given("post", options, CallOptions)
        return await self._exchange(path, rest, given, self._core.options.timeouts.generate, kind=kinds.get(path))

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
        return Exchange(path=_CHAT, kind=writing_kind(body), deadline=deadline, body=body, **common), schema
