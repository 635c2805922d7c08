"""The client that backend services call NPU worker nodes with.

    from backend_client import NPUClient

    async with NPUClient(["http://10.0.0.22:8081"]) as client:
        vector = await client.embed("text")

`InferenceClient` puts a cloud behind the nodes; `backend_client.sync` has the blocking twins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from backend_client.client import InferenceClient, NPUClient
from backend_client.cloud.ledger import Ledger, Tally
from backend_client.errors import (
    AttemptTimeout,
    AuthenticationFailed,
    BadReply,
    BatchFailure,
    ClientClosed,
    CloudError,
    CloudRejected,
    CloudUnavailable,
    ConfigurationError,
    ConnectionLost,
    ContextLengthExceeded,
    DeadlineExceeded,
    EmbedManyFailed,
    EmbedManyUnavailable,
    FleetOverloaded,
    InvalidAnswer,
    InvalidArgument,
    KeyRefused,
    ModelMissing,
    ModelNotFound,
    NodeError,
    NodeFailed,
    NodeLost,
    NodeNotServing,
    NodeOverloaded,
    NodeUnreachable,
    NotOffered,
    NPUError,
    NPUUnavailableError,
    PayloadTooLarge,
    RequestRejected,
    SpaceChanged,
    SpendCapReached,
    StreamInterrupted,
    VectorSpaceMismatch,
)
from backend_client.options import ClientOptions
from backend_client.results import (
    Attempt,
    ChatChoice,
    ChatDelta,
    ChatOptions,
    ChatResult,
    EmbedManyResult,
    EmbedOptions,
    EmbedResult,
    GenerateOptions,
    GenerateResult,
    RankedDocument,
    RawReply,
    RerankOptions,
    RerankResult,
    Timing,
    ToolCall,
    ToolCallDelta,
    TranscribeOptions,
    Transcription,
    TranscriptionSegment,
    TranscriptionWord,
    Usage,
)
from backend_client.settings import ClientSettings, CloudSettings
from backend_client.status import NodeStatus
from backend_client.streams import ChatStream, TokenStream

# As in openai-python, where a client that is awaited says so.
AsyncNPUClient = NPUClient
AsyncInferenceClient = InferenceClient

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from backend_client.cloud import CloudClient

__all__ = [
    "AsyncInferenceClient",
    "AsyncNPUClient",
    "Attempt",
    "AttemptTimeout",
    "AuthenticationFailed",
    "BadReply",
    "BatchFailure",
    "ChatChoice",
    "ChatDelta",
    "ChatOptions",
    "ChatResult",
    "ChatStream",
    "ClientClosed",
    "ClientOptions",
    "ClientSettings",
    "CloudClient",
    "CloudError",
    "CloudRejected",
    "CloudSettings",
    "CloudUnavailable",
    "ConfigurationError",
    "ConnectionLost",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EmbedManyFailed",
    "EmbedManyResult",
    "EmbedManyUnavailable",
    "EmbedOptions",
    "EmbedResult",
    "FleetOverloaded",
    "GenerateOptions",
    "GenerateResult",
    "InferenceClient",
    "InvalidAnswer",
    "InvalidArgument",
    "KeyRefused",
    "Ledger",
    "ModelMissing",
    "ModelNotFound",
    "NPUClient",
    "NPUError",
    "NPUUnavailableError",
    "NodeError",
    "NodeFailed",
    "NodeLost",
    "NodeNotServing",
    "NodeOverloaded",
    "NodeStatus",
    "NodeUnreachable",
    "NotOffered",
    "PayloadTooLarge",
    "RankedDocument",
    "RawReply",
    "RequestRejected",
    "RerankOptions",
    "RerankResult",
    "SpaceChanged",
    "SpendCapReached",
    "StreamInterrupted",
    "Tally",
    "Timing",
    "TokenStream",
    "ToolCall",
    "ToolCallDelta",
    "TranscribeOptions",
    "Transcription",
    "TranscriptionSegment",
    "TranscriptionWord",
    "Usage",
    "VectorSpaceMismatch",
    "openai",
]


def openai(settings: ClientSettings | None = None, **options: Any) -> AsyncOpenAI:
    """The OpenAI SDK (AsyncOpenAI) over the fleet, and the cloud behind it, that the settings describe.

    Code that takes an OpenAI client gets routing by health, retries in one budget and one deadline, streams that are
    never repeated in the middle, and the check of vector spaces. Closing it closes the client. `options` as in
    `InferenceClient.from_settings`. Raises ConfigurationError.
    """
    # Imported lazily: slow, and only its users need it.
    from backend_client.sdk.client import openai_over  # noqa: PLC0415

    return openai_over(InferenceClient.from_settings(settings, **options))


def __getattr__(name: str) -> Any:
    # Imported lazily: slow, and only the cloud needs it.
    if name == "CloudClient":
        from backend_client.cloud import CloudClient  # noqa: PLC0415

        return CloudClient
    # `import backend_client` is enough for `backend_client.sync.openai()`.
    if name in {"cloud", "observability", "sync", "testing"}:
        return importlib.import_module(f"backend_client.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
