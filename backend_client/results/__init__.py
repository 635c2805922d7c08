"""What calls take and return: plain frozen data. Texts and vectors are kept out of every repr."""

from backend_client.results.answers import (
    ChatChoice,
    ChatDelta,
    ChatResult,
    GenerateResult,
    Timing,
    ToolCall,
    ToolCallDelta,
)
from backend_client.results.calls import (
    CallOptions,
    ChatOptions,
    Device,
    EmbedOptions,
    GenerateOptions,
    Priority,
    RerankOptions,
    TranscribeOptions,
)
from backend_client.results.origin import Attempt, FailureKind, Origin, RawReply, Source, Usage
from backend_client.results.tasks import (
    RankedDocument,
    RerankResult,
    Transcription,
    TranscriptionSegment,
    TranscriptionWord,
)
from backend_client.results.vectors import EmbedBatch, EmbedManyResult, EmbedResult

__all__ = [
    "Attempt",
    "CallOptions",
    "ChatChoice",
    "ChatDelta",
    "ChatOptions",
    "ChatResult",
    "Device",
    "EmbedBatch",
    "EmbedManyResult",
    "EmbedOptions",
    "EmbedResult",
    "FailureKind",
    "GenerateOptions",
    "GenerateResult",
    "Origin",
    "Priority",
    "RankedDocument",
    "RawReply",
    "RerankOptions",
    "RerankResult",
    "Source",
    "Timing",
    "ToolCall",
    "ToolCallDelta",
    "TranscribeOptions",
    "Transcription",
    "TranscriptionSegment",
    "TranscriptionWord",
    "Usage",
]
