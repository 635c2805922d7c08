"""The methods that every client has, whichever backend does the work: the fleet, the cloud, or both in that order."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from backend_client import arguments
from backend_client.arguments import Audio
from backend_client.embed_many import Progress, Source, embed_in_batches, embed_windowed
from backend_client.errors import DeadlineExceeded, InvalidArgument
from backend_client.http.answers import count_in, ranking_in, transcription_in
from backend_client.http.messages import ModelReport, Request, encode, split_options
from backend_client.http.replies import Forwarded
from backend_client.http.routes import ROUTES
from backend_client.http.stream_forms import EventStream
from backend_client.lifetime import Clock, Deadline, OneLoop, OpenCalls
from backend_client.options import ClientOptions
from backend_client.results import (
    CallOptions,
    ChatOptions,
    ChatResult,
    EmbedBatch,
    EmbedManyResult,
    EmbedOptions,
    EmbedResult,
    GenerateOptions,
    GenerateResult,
    RankedDocument,
    RawReply,
    RerankOptions,
    RerankResult,
    TranscribeOptions,
    Transcription,
    origin_fields,
)
from backend_client.streams import (
    ChatStream,
    TokenStream,
    chat_result,
    generate_result,
    invalid_answer,
)


class Backend(Protocol):
    """What can do the work: the fleet, the cloud, or the two in that order."""

    async def embed(self, request: Request) -> EmbedBatch:
        """The vectors of the texts of a request to /embeddings."""
        ...

    async def send(self, request: Request) -> RawReply:
        """The whole reply to a request."""
        ...

    async def open(self, request: Request) -> EventStream:
        """The reply as a stream; returns once a part of the answer is there. What came before it is among the first
        events.
        """
        ...

    async def forward(self, request: Request) -> Forwarded:
        """The reply to a request that came as bytes (`content`), a node's with its bytes unchanged."""
        ...

    async def close(self) -> None:
        """Release connections and tasks."""
        ...


class Nodes(Protocol):
    """What clients ask beside calls. `calls` are those under way there."""

    @property
    def calls(self) -> OpenCalls: ...

    async def models(self) -> Sequence[ModelReport]:
        """The models of all nodes, as they report them; none for the cloud."""
        ...

    def concurrency(self) -> int:
        """How many batches of one `embed_many` may be under way at once."""
        ...


@dataclass(slots=True)
class Core:
    """What a client and all its views share: for other modules of this package."""

    backend: Backend
    nodes: Nodes
    options: ClientOptions
    clock: Clock


class _Viewed:
    """A client that shares its connections with the views on it, and cannot be sent to another process."""

    def _view(self, **changes: Any) -> Self:
        view = object.__new__(type(self))
        vars(view).update(vars(self), **changes)
        return view

    def __copy__(self) -> Self:
        return self._view()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it holds connections; build one in each process, "
            "for example with from_settings()"
        )


M = TypeVar("M", bound=BaseModel)
Messages = Sequence[Mapping[str, Any] | BaseModel]
"""OpenAI's messages: dicts, or the SDK's own objects."""

_RAW_PATHS = [path for path, route in ROUTES.items() if route.sdk and not route.upload]


class BaseClient(_Viewed):
    """All tasks over a backend. Use as `async with`, or `close()` it.

    Every method raises InvalidArgument, before anything is sent, for a wrong argument or option (None means not given),
    RequestRejected for a request that would be refused again, and NPUUnavailableError (of which
    DeadlineExceeded is one) when nobody could serve it; see `backend_client.errors`.
    """

    def __init__(self, backend: Backend, nodes: Nodes, options: ClientOptions, clock: Clock = time.monotonic) -> None:
        self.core = Core(backend, nodes, options, clock)
        self._defaults: Mapping[str, Any] = {}

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """A view on this client whose calls have these options unless they are given others.

        It costs nothing: nodes, connections and budgets are the same, and closing it closes the client.
        """
        given = arguments.options("with_options", options, CallOptions)
        return self._view(_defaults={**self._defaults, **given})

    async def close(self) -> None:
        """Release connections and tasks. Calls that are under way end at once with ClientClosed."""
        await self.core.backend.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def embed(self, text: str, **options: Unpack[EmbedOptions]) -> list[float]:
        """The vector of a text."""
        batch = await self.core.backend.embed(self._one_text("embed", text, options))
        vector: list[float] = batch.vectors[0].tolist()
        return vector

    async def embed_result(self, text: str, **options: Unpack[EmbedOptions]) -> EmbedResult:
        """The vector of a text, its vector space, and who made it."""
        batch = await self.core.backend.embed(self._one_text("embed_result", text, options))
        return EmbedResult(
            vector=batch.vectors[0].tolist(),
            space=batch.space,
            usage=batch.usage,
            **origin_fields(batch),
        )

    async def embed_batch(self, texts: Sequence[str], **options: Unpack[EmbedOptions]) -> EmbedBatch:
        """The vectors of a few texts in one request, and who made them. Raises PayloadTooLarge for too many."""
        given = self._given("embed_batch", options, EmbedOptions)
        return await self.core.backend.embed(self._embed_request(arguments.text_list(texts), given))

    async def embed_many(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> npt.NDArray[np.float32]:
        """The vectors of any number of texts, float32 (n, d), in their order; see `embed_many_result`."""
        return (await self.embed_many_result(texts, progress=progress, **options)).vectors

    async def embed_many_result(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> EmbedManyResult:
        """The vectors of any number of texts, in batches over all nodes, never of more than one vector space.

        `timeout` bounds the whole; without one each batch has the default time of a call. Raises EmbedManyFailed
        when some batches failed, with the vectors of the others; EmbedManyUnavailable, which is also an
        NPUUnavailableError, when that was for want of a node.
        """
        given = self._given("embed_many", options, EmbedOptions)
        if progress is not None and (not callable(progress) or inspect.iscoroutinefunction(progress)):
            raise InvalidArgument("progress must be a plain function, which is not awaited", param="progress")
        # One deadline for all, made once; the batches get what remains of it when they start.
        whole = self._deadline(given, 0.0) if "timeout" in given else None

        async def embed(part: Sequence[str]) -> EmbedBatch:
            request = self._embed_request(part, given)
            return await self.core.backend.embed(replace(request, deadline=whole) if whole else request)

        return await embed_in_batches(
            _checked(texts),
            embed,
            options=self.core.options.batch,
            concurrency=self.core.nodes.concurrency(),
            probing=max(1, self.core.nodes.concurrency() // self.core.options.batch.per_node),
            calls=self.core.nodes.calls,
            until=whole,
            progress=progress,
        )

    def embed_stream(
        self, texts: Iterable[str] | AsyncIterable[str], **options: Unpack[EmbedOptions]
    ) -> AsyncGenerator[EmbedBatch, None]:
        """Embed texts as they come, in constant memory: yields batches of vectors in the order of the texts.

        `texts` is read in a thread of its own, or in a task if it is asynchronous, so that only this stream waits for a
        slow source. `timeout` bounds each batch. An error of the source or of a batch is raised in its turn, when the
        vectors of all texts before it have been yielded.
        """
        given = self._given("embed_stream", options, EmbedOptions)

        async def embed(part: Sequence[str]) -> EmbedBatch:
            return await self.core.backend.embed(self._embed_request(part, given))

        batches = embed_windowed(
            _checked(texts),
            embed,
            options=self.core.options.batch,
            window=self.core.nodes.concurrency(),
            calls=self.core.nodes.calls,
        )
        return OneLoop(batches)

    async def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """The answer to a prompt."""
        return generate_result(await self.core.backend.send(self._generate_request("generate", prompt, options)))

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> TokenStream:
        """The answer to a prompt, piece by piece: `async for piece in client.stream(prompt)`.

        Raises StreamInterrupted, which holds the text so far, when the answer stops after its first piece.
        """
        request = self._generate_request("stream", prompt, options)
        return TokenStream(lambda: self.core.backend.open(request))

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """The answer to a conversation.

        `messages` are OpenAI's, with text and image parts. With a pydantic model as `response_format` the answer is
        validated and in `parsed`. Raises InvalidAnswer when it does not validate.
        """
        request, schema = self._chat_request("chat", messages, options)
        return chat_result(await self.core.backend.send(request), schema)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """The answer to a conversation, delta by delta; `result` is there after the last.

        Raises StreamInterrupted, which holds the text so far, when the answer stops after its first delta.
        """
        request, schema = self._chat_request("stream_chat", messages, options)
        return ChatStream(lambda: self.core.backend.open(request), schema)

    async def parse(self, messages: Messages, schema: type[M], **options: Unpack[ChatOptions]) -> M:
        """The answer to a conversation as an object of a pydantic model.

        Raises InvalidAnswer, which holds the text, when it does not validate or the model called a tool instead.
        """
        request, _ = self._chat_request("parse", messages, {**options, "response_format": schema})
        result = chat_result(await self.core.backend.send(request), schema)
        if isinstance(result.parsed, schema):
            return result.parsed
        raise invalid_answer(schema, result, "the model called a tool instead")

    async def count_tokens(self, messages: Messages | str, **options: Unpack[CallOptions]) -> int:
        """How many tokens a conversation, or a prompt as it stands, has for the model."""
        given = self._given("count_tokens", options, CallOptions)
        if isinstance(messages, str):
            body: dict[str, Any] = {"prompt": arguments.text(messages, "messages")}
        else:
            body = {"messages": arguments.messages(messages)}
        request = self._request("/tokenize", body, given, self.core.options.timeouts.embed)
        return count_in((await self.core.backend.send(request)).body)

    async def post(self, path: str, body: Mapping[str, Any], **options: Unpack[CallOptions]) -> RawReply:
        """A request in OpenAI's dialect as it is, and the reply with its headers.

        `body` may name its model itself, which goes before the default of `with_options`. Routing, retries, the
        deadline and the check of vector spaces are those of the other calls. Raises InvalidArgument for a path that is
        no inference.
        """
        if path not in _RAW_PATHS:
            raise InvalidArgument(f"path must be one of {', '.join(_RAW_PATHS)}", param="path")
        if not isinstance(body, Mapping):
            raise InvalidArgument(f"body must be a mapping, got {type(body).__name__}", param="body")
        if body.get("stream"):
            raise InvalidArgument("post() does not stream: call stream_chat", param="stream")
        rest = {name: value for name, value in body.items() if name not in {"model", "stream"}}
        if options.get("model") is None:
            options["model"] = body.get("model")
        given = self._given("post", options, CallOptions)
        return await self.core.backend.send(self._request(path, rest, given, self.core.options.timeouts.generate))

    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> RerankResult:
        """The documents by their relevance to the query, the most relevant first.

        Raises NotOffered, before anything is sent, where no node has a model for it.
        """
        given = self._given("rerank", options, RerankOptions)
        texts = arguments.text_list(documents, "documents")
        if not texts:
            raise InvalidArgument("documents is empty: there is nothing to rank", param="documents")
        body = {"query": arguments.text(query, "query"), "documents": texts}
        reply = await self.core.backend.send(self._request("/v1/rerank", body, given, self.core.options.timeouts.embed))
        scores = ranking_in(reply.body, len(texts), given.get("top_n", len(texts)))
        scores.sort(key=lambda scored: -scored[1])
        ranked = tuple(RankedDocument(index, score, texts[index]) for index, score in scores)
        return RerankResult(documents=ranked, usage=reply.usage, **origin_fields(reply))

    async def transcribe(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcription:
        """The text of a recording: a file's path, its bytes, or a file opened in binary mode (read to its end).

        The deadline includes the reading. The recording is held in memory, and sent again where a node fails before
        its reply. Raises NotOffered, before anything is sent, where no node has a model for it.
        """
        given = self._given("transcribe", options, TranscribeOptions)
        common, fields = split_options(given)
        deadline = self._deadline(given, self.core.options.timeouts.generate)
        file = None
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining()):
                file = await arguments.recording(audio)
        if file is None:
            raise DeadlineExceeded("the call's time was up before the recording was read; increase `timeout`")
        granularities = fields.pop("timestamp_granularities", None)
        body: dict[str, Any] = {"response_format": "verbose_json"}
        body |= {field: arguments.form_value(value, field) for field, value in fields.items()}
        if granularities is not None:
            body["timestamp_granularities[]"] = granularities
        request = Request(
            path="/v1/audio/transcriptions",
            kind="transcription",
            deadline=deadline,
            body=body,
            file=file,
            **common,
        )
        reply = await self.core.backend.send(request)
        return Transcription(**transcription_in(reply.body), **origin_fields(reply))

    def _given(self, method: str, options: Mapping[str, Any], declared: type) -> dict[str, Any]:
        """The options of a call, checked, with the defaults of this view. Raises InvalidArgument."""
        if not options:
            return {**self._defaults}
        return {**self._defaults, **arguments.options(method, options, declared)}

    def _deadline(self, given: Mapping[str, Any], default: float) -> Deadline:
        return Deadline.after(given.get("timeout", default), self.core.clock)

    def _one_text(self, method: str, text: str, options: EmbedOptions) -> Request:
        given = self._given(method, options, EmbedOptions)
        # Nearly all texts pass without a call.
        checked = text if type(text) is str and text.isascii() else arguments.text(text, "text")
        return self._embed_request([checked], given)

    def _embed_request(self, texts: Sequence[str], given: Mapping[str, Any]) -> Request:
        common, others = split_options(given) if given else ({}, {})
        deadline = self._deadline(given, self.core.options.timeouts.embed)
        if others.get("truncate") is False:
            del others["truncate"]
        body = {"texts": texts, **others}
        return Request(path="/embeddings", kind="embedding", body=body, deadline=deadline, **common)

    def _request(self, path: str, body: Mapping[str, Any], given: Mapping[str, Any], timeout: float) -> Request:
        """A request with this body and those options that belong into it."""
        common, others = split_options(given)
        body = {**body, **others}
        encode(body)
        defaults = self.core.options.failover
        common["failover"] = common["failover"].over(defaults) if "failover" in common else defaults
        deadline = self._deadline(given, timeout)
        ends = deadline if "timeout" in given else None
        return Request(path=path, kind=ROUTES[path].kind_of(body), deadline=deadline, ends=ends, body=body, **common)

    def _generate_request(self, method: str, prompt: str, options: GenerateOptions) -> Request:
        given = self._given(method, options, GenerateOptions)
        body = {"prompt": arguments.text(prompt, "prompt")}
        return self._request("/inference", body, given, self.core.options.timeouts.generate)

    def _chat_request(
        self, method: str, messages: Messages, options: Mapping[str, Any]
    ) -> tuple[Request, type[BaseModel] | None]:
        given = self._given(method, options, ChatOptions)
        schema = given.get("response_format")
        if method == "parse" or arguments.is_model(schema):
            given["response_format"] = arguments.response_format(schema)
        else:
            schema = None
        body = {"messages": arguments.messages(messages)}
        return self._request("/v1/chat/completions", body, given, self.core.options.timeouts.generate), schema


def _checked(texts: Source) -> Source:
    """The texts, checked where all are there; others are checked as they are read."""
    return arguments.text_list(texts) if isinstance(texts, list | tuple) else texts
