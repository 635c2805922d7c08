"""The blocking twins: the same clients for code without an event loop. Safe to call from any thread.

from backend_client.sync import NPUClient

with NPUClient(["http://10.0.0.22:8081"]) as client:
    vector = client.embed("text")
    for piece in client.stream("prompt"):
        print(piece, end="")
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import SecretStr

from backend_client._api import inference_client, npu_client
from backend_client._api.arguments import text_list
from backend_client._api.base_client import BaseClient
from backend_client._api.batching import Progress
from backend_client._api.loop_thread import LoopThread
from backend_client._api.status import ClientStatus, NodeStatus
from backend_client._api.token_stream import TokenStream
from backend_client._cloud.ledger import Ledger
from backend_client.errors import ClientClosed
from backend_client.options import ClientOptions
from backend_client.results import (
    EmbedBatch,
    EmbedManyResult,
    EmbedOptions,
    EmbedResult,
    GenerateOptions,
    GenerateResult,
)
from backend_client.settings import ClientSettings

C = TypeVar("C", bound=BaseClient)

__all__ = ["BlockingStream", "InferenceClient", "NPUClient"]


class BlockingStream:
    """A streamed answer: iterate for its pieces; `result` is there after the last. Use as `with`, or `close()` it."""

    def __init__(self, thread: LoopThread, stream: TokenStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer, once it has ended."""
        return self._stream.result

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
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

    async def _next(self) -> str | None:
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

    def embed_many(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> npt.NDArray[np.float32]:
        """See `BaseClient.embed_many`. `texts` is read in this thread, `progress` is called in the client's."""
        return self._thread.run(self._client.embed_many(text_list(texts), progress=progress, **options))

    def embed_many_result(
        self, texts: Iterable[str], *, progress: Progress | None = None, **options: Unpack[EmbedOptions]
    ) -> EmbedManyResult:
        """See `BaseClient.embed_many_result`. `texts` is read in this thread, `progress` is called in the client's."""
        return self._thread.run(self._client.embed_many_result(text_list(texts), progress=progress, **options))

    def embed_stream(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Generator[EmbedBatch, None, None]:
        """See `BaseClient.embed_stream`. `texts` is read in the client's thread."""
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

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> BlockingStream:
        """See `BaseClient.stream`."""
        return BlockingStream(self._thread, self._client.stream(prompt, **options))

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


class NPUClient(Blocking[npu_client.NPUClient]):
    """The blocking `backend_client.NPUClient`."""

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        api_key: SecretStr | str | None = None,
        spaces: Mapping[str, str] | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__(npu_client.NPUClient(nodes, api_key=api_key, spaces=spaces, options=options))

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None) -> Self:
        """The client that the settings describe."""
        settings = settings or ClientSettings.load()
        return cls(settings.nodes, api_key=settings.api_key, spaces=settings.spaces, options=settings.options())

    def health(self) -> tuple[NodeStatus, ...]:
        """See `backend_client.NPUClient.health`."""
        return self._thread.run(self._client.health())

    def healthz(self) -> ClientStatus:
        """See `backend_client.NPUClient.healthz`. It waits for nothing, not even for the client's thread."""
        return self._client.healthz()


class InferenceClient(Blocking[inference_client.InferenceClient]):
    """The blocking `backend_client.InferenceClient`."""

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None) -> Self:
        """The client that the settings describe."""
        return cls(inference_client.InferenceClient.from_settings(settings))

    def healthz(self) -> ClientStatus:
        """See `backend_client.InferenceClient.healthz`. It waits for nothing, not even for the client's thread."""
        return self._client.healthz()

    @property
    def ledger(self) -> Ledger:
        """What was kept local, what went to the cloud, and its cost."""
        return self._client.ledger
