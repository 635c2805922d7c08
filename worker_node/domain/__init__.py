"""What the parts of the node say to each other: plain frozen data, no I/O, no HTTP."""

from worker_node.domain.conversation import Message, Picture, Rendering, Tool, ToolCall, ToolUse
from worker_node.domain.generation import (
    AnswerSchema,
    Finished,
    FinishReason,
    GivenForm,
    Piece,
    Reasoning,
    Sampling,
    Token,
    TokenIds,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStarted,
)
from worker_node.domain.models import Device, ModelKind, Route, RouteReason
from worker_node.domain.requests import Priority, RequestContext, Timing, Usage

__all__ = [
    "AnswerSchema",
    "Device",
    "FinishReason",
    "Finished",
    "GivenForm",
    "Message",
    "ModelKind",
    "Picture",
    "Piece",
    "Priority",
    "Reasoning",
    "Rendering",
    "RequestContext",
    "Route",
    "RouteReason",
    "Sampling",
    "Timing",
    "Token",
    "TokenIds",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStarted",
    "ToolUse",
    "Usage",
]
