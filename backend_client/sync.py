"""The blocking twins: the same clients for code without an event loop. Safe to call from any thread.

from backend_client.sync import NPUClient

with NPUClient(["http://10.0.0.22:8081"]) as client:
    vector = client.embed("text")
    for piece in client.stream("prompt"):
        print(piece, end="")
"""

from __future__ import annotations

import ssl
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, SecretStr

from backend_client import client
from backend_client.arguments import Audio
from backend_client.calls import BaseClient, Messages, not_picklable
from backend_client.client import ClientStatus, NodeStatus
from backend_client.cloud.ledger import Ledger
from backend_client.embed_many import Progress
from backend_client.errors import ClientClosed
from backend_client.lifetime import LoopThread
from backend_client.options import ClientOptions
from backend_client.results import (
    CallOptions,
    ChatDelta,
    ChatOptions,
    ChatResult,
    EmbedBatch,
    EmbedManyResult,
    EmbedOptions,
    EmbedResult,
    GenerateOptions,
    GenerateResult,
    RawReply,
    RerankOptions,
    RerankResult,
    TranscribeOptions,
    Transcription,
)
from backend_client.settings import ClientSettings
from backend_client.streams import ResultStream

C = TypeVar("C", bound=BaseClient)
M = TypeVar("M", bound=BaseModel)
P = TypeVar("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = ["BlockingStream", "InferenceClient", "NPUClient", "openai"]


class BlockingStream(Generic[P, R]):
    """A streamed answer: iterate for its pieces; `result` is there after the last. Use as `with`, or `close()` it."""

    def __init__(self, thread: LoopThread, stream: ResultStream[P, R]) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def result(self) -> R | None:
        """The whole answer, once it has ended."""
        return self._stream.result

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        piece = self._thread.run(self._next())
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Stop the answer."""
        with suppress(ClientClosed):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> P | None:
        # StopAsyncIteration cannot cross from one thread to another as the result of a coroutine.
        return await anext(self._stream, None)


class Blocking(Generic[C]):
    """The methods of `BaseClient`, waited for. Its client lives in the event loop of a thread of its own."""

    def __init__(self, inner: C) -> None:
        self._client = inner
        self._thread = LoopThread(type(self).__name__, inner.close)

    @property
    def inner(self) -> C:
        """The client inside, which only its own thread may call."""
        return self._client

    def embed(self, text: str, **options: Unpack[EmbedOptions]) -> list[float]:
        """See `BaseClient.embed`."""
        return self._thread.run(self._client.embed(text, **options))

    def embed_result(self, text: str, **options: Unpack[EmbedOptions]) -> EmbedResult:
        """See `BaseClient.embed_result`."""
        return self._thread.run(self._client.embed_result(text, **options))

    def embed_batch(self, texts: Sequence[str], **options: Unpack[EmbedOptions]) -> EmbedBatch:
        """See `BaseClient.embed_batch`."""
        return self._thread.run(self._client.embed_batch(texts, **options))

    def embed_many(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> npt.NDArray[np.float32]:
        """See `BaseClient.embed_many`. `progress` is called in the client's thread."""
        return self._thread.run(self._client.embed_many(texts, progress=progress, **options))

    def embed_many_result(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> EmbedManyResult:
        """See `BaseClient.embed_many_result`. `progress` is called in the client's thread."""
        return self._thread.run(self._client.embed_many_result(texts, progress=progress, **options))

    def embed_stream(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Generator[EmbedBatch, None, None]:
        """See `BaseClient.embed_stream`."""
        batches = self._client.embed_stream(texts, **options)

        async def following() -> EmbedBatch | None:
            return await anext(batches, None)

        async def stop() -> None:
            await batches.aclose()

        try:
            while (batch := self._thread.run(following())) is not None:
                yield batch
        finally:
            with suppress(ClientClosed):
                self._thread.run(stop())

    def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """See `BaseClient.generate`."""
        return self._thread.run(self._client.generate(prompt, **options))

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> BlockingStream[str, GenerateResult]:
        """See `BaseClient.stream`."""
        return BlockingStream(self._thread, self._client.stream(prompt, **options))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """See `BaseClient.chat`."""
        return self._thread.run(self._client.chat(messages, **options))

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> BlockingStream[ChatDelta, ChatResult]:
        """See `BaseClient.stream_chat`."""
        return BlockingStream(self._thread, self._client.stream_chat(messages, **options))

    def parse(self, messages: Messages, schema: type[M], **options: Unpack[ChatOptions]) -> M:
        """See `BaseClient.parse`."""
        return self._thread.run(self._client.parse(messages, schema, **options))

    def count_tokens(self, messages: Messages | str, **options: Unpack[CallOptions]) -> int:
        """See `BaseClient.count_tokens`."""
        return self._thread.run(self._client.count_tokens(messages, **options))

    def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> RerankResult:
        """See `BaseClient.rerank`."""
        return self._thread.run(self._client.rerank(query, documents, **options))

    def transcribe(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcription:
        """See `BaseClient.transcribe`."""
        return self._thread.run(self._client.transcribe(audio, **options))

    def post(self, path: str, body: Mapping[str, Any], **options: Unpack[CallOptions]) -> RawReply:
        """See `BaseClient.post`."""
        return self._thread.run(self._client.post(path, body, **options))

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """See `BaseClient.with_options`."""
        view = self.__copy__()
        vars(view)["_client"] = self._client.with_options(**options)
        return view

    def __copy__(self) -> Self:
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        return view

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def close(self) -> None:
        """Release connections and end the thread."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"sync.{self._client!r}"


class NPUClient(Blocking[client.NPUClient]):
    """The blocking `backend_client.NPUClient`."""

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        api_key: SecretStr | str | None = None,
        spaces: Mapping[str, str] | None = None,
        options: ClientOptions | None = None,
        node_keys: Mapping[str, str] | None = None,
        ca_file: Path | str | None = None,
        client_cert: Path | str | None = None,
        client_key: Path | str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        super().__init__(
            client.NPUClient(
                nodes,
                api_key=api_key,
                spaces=spaces,
                options=options,
                node_keys=node_keys,
                ca_file=ca_file,
                client_cert=client_cert,
                client_key=client_key,
                ssl_context=ssl_context,
                proxy=proxy,
            )
        )

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """See `backend_client.NPUClient.from_settings`."""
        made = cls.__new__(cls)
        Blocking.__init__(made, client.NPUClient.from_settings(settings, **options))
        return made

    def status(self) -> tuple[NodeStatus, ...]:
        """See `backend_client.NPUClient.status`. It waits for nothing, not even for the client's thread."""
        return self._client.status()

    def health(self) -> tuple[NodeStatus, ...]:
        """See `backend_client.NPUClient.health`."""
        return self._thread.run(self._client.health())

    def healthz(self) -> ClientStatus:
        """See `backend_client.NPUClient.healthz`. It waits for nothing, not even for the client's thread."""
        return self._client.healthz()


class InferenceClient(Blocking[client.InferenceClient]):
    """The blocking `backend_client.InferenceClient`."""

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """See `backend_client.InferenceClient.from_settings`."""
        return cls(client.InferenceClient.from_settings(settings, **options))

    def healthz(self) -> ClientStatus:
        """See `backend_client.InferenceClient.healthz`. It waits for nothing, not even for the client's thread."""
        return self._client.healthz()

    @property
    def ledger(self) -> Ledger:
        """What was kept local, what went to the cloud, and its cost."""
        return self._client.ledger


def openai(settings: ClientSettings | None = None, **options: Any) -> OpenAI:
    """The blocking OpenAI SDK over the fleet; see `backend_client.openai`."""
    # Imported lazily: slow, and only its users need it.
    from backend_client.sdk.client import blocking_openai_over  # noqa: PLC0415

    return blocking_openai_over(client.InferenceClient.from_settings(settings, **options))
