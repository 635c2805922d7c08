"""The same clients, blocking, for code without an event loop. Safe to call from any thread.

from backend_client.sync import NPUClient

with NPUClient(["http://10.0.0.22:8081"]) as client:
    vector = client.embed("text")
    for piece in client.stream("prompt"):
        print(piece, end="")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from pydantic import BaseModel

from backend_client import client
from backend_client.calls import BaseClient, Messages, _Viewed
from backend_client.client import ClientStatus, NodeStatus
from backend_client.cloud import Ledger
from backend_client.lifetime import LoopIterator, LoopThread
from backend_client.results import (
    CallOptions,
    ChatDelta,
    ChatOptions,
    ChatResult,
    EmbedBatch,
    EmbedOptions,
    GenerateOptions,
    GenerateResult,
)
from backend_client.settings import ClientSettings
from backend_client.streams import ResultStream

C = TypeVar("C", bound=client.NPUClient | client.InferenceClient)
M = TypeVar("M", bound=BaseModel)
P = TypeVar("P")
A = ParamSpec("A")
R = TypeVar("R")

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = ["BlockingStream", "InferenceClient", "NPUClient", "openai"]


class BlockingStream(LoopIterator[P], Generic[P, R]):
    """A streamed answer: iterate for its pieces; `result` is there after the last. Use as `with`, or `close()` it."""

    def __init__(self, thread: LoopThread, stream: ResultStream[P, R]) -> None:
        super().__init__(thread, stream)
        self._stream = stream

    @property
    def result(self) -> R | None:
        """The whole answer, once it has ended."""
        return self._stream.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _waiting_for(method: Callable[Concatenate[Any, A], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, A], R]:
    """The method of a blocking client that runs one of `BaseClient` and returns what it returns."""

    def call(self: Blocking[Any], /, *args: A.args, **options: A.kwargs) -> R:
        return self._thread.run(method(self._client, *args, **options))

    call.__name__, call.__qualname__ = method.__name__, f"Blocking.{method.__name__}"
    call.__doc__ = f"See `BaseClient.{method.__name__}`."
    vars(call)["__signature__"] = inspect.signature(method)
    return call


def _with_parameters_of(
    make: Callable[A, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, A], None]]:
    """A constructor whose parameters are those of another class."""

    def typed(init: Callable[..., None]) -> Callable[Concatenate[Any, A], None]:
        vars(init)["__signature__"] = inspect.signature(vars(make)["__init__"])
        return init

    return typed


class Blocking(_Viewed, Generic[C]):
    """The methods of the clients, waited for. Its client lives in the event loop of a thread of its own.

    That thread calls the `progress` of `embed_many`.
    """

    _from_settings: ClassVar[Callable[..., Any]]

    def __init__(self, inner: C) -> None:
        self._client = inner
        self._thread = LoopThread(type(self).__name__, inner.close)

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """See `backend_client.InferenceClient.from_settings`."""
        made = cls.__new__(cls)
        Blocking.__init__(made, cls._from_settings(settings, **options))
        return made

    @property
    def inner(self) -> C:
        """The client inside, which only its own thread may call."""
        return self._client

    embed = _waiting_for(BaseClient.embed)
    embed_result = _waiting_for(BaseClient.embed_result)
    embed_batch = _waiting_for(BaseClient.embed_batch)
    embed_many = _waiting_for(BaseClient.embed_many)
    embed_many_result = _waiting_for(BaseClient.embed_many_result)
    generate = _waiting_for(BaseClient.generate)
    chat = _waiting_for(BaseClient.chat)
    parse = _waiting_for(BaseClient.parse)
    count_tokens = _waiting_for(BaseClient.count_tokens)
    rerank = _waiting_for(BaseClient.rerank)
    transcribe = _waiting_for(BaseClient.transcribe)
    post = _waiting_for(BaseClient.post)

    def embed_stream(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> LoopIterator[EmbedBatch]:
        """See `BaseClient.embed_stream`."""
        return LoopIterator(self._thread, self._client.embed_stream(texts, **options))

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> BlockingStream[str, GenerateResult]:
        """See `BaseClient.stream`."""
        return BlockingStream(self._thread, self._client.stream(prompt, **options))

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> BlockingStream[ChatDelta, ChatResult]:
        """See `BaseClient.stream_chat`."""
        return BlockingStream(self._thread, self._client.stream_chat(messages, **options))

    def healthz(self) -> ClientStatus:
        """See `backend_client.InferenceClient.healthz`. It waits for nothing, not even for the client's thread."""
        return self._client.healthz()

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """See `BaseClient.with_options`."""
        return self._view(_client=self._client.with_options(**options))

    def close(self) -> None:
        """Release connections and end the thread."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"sync.{self._client!r}"


class NPUClient(Blocking[client.NPUClient]):
    """The blocking `backend_client.NPUClient`."""

    _from_settings = client.NPUClient.from_settings

    @_with_parameters_of(client.NPUClient)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(client.NPUClient(*args, **options))

    def status(self) -> tuple[NodeStatus, ...]:
        """See `backend_client.NPUClient.status`. It waits for nothing, not even for the client's thread."""
        return self._client.status()

    def health(self) -> tuple[NodeStatus, ...]:
        """See `backend_client.NPUClient.health`."""
        return self._thread.run(self._client.health())


class InferenceClient(Blocking[client.InferenceClient]):
    """The blocking `backend_client.InferenceClient`."""

    _from_settings = client.InferenceClient.from_settings

    @property
    def ledger(self) -> Ledger:
        """What was kept local, what went to the cloud, and its cost."""
        return self._client.ledger


def openai(settings: ClientSettings | None = None, **options: Any) -> OpenAI:
    """The blocking OpenAI SDK over the fleet; see `backend_client.openai`."""
    # Imported lazily: slow, and only its users need it.
    from backend_client.sdk.client import blocking_openai_over  # noqa: PLC0415

    return blocking_openai_over(client.InferenceClient.from_settings(settings, **options))
