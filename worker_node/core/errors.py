"""The errors that the node answers with, each with its HTTP status and its stable `code`.

`param` is what is at fault where it is a part of the request; `retry_after` is in seconds, for a `Retryable` error. An
error of a placement also knows its `model` and `device`. The message says what happened, on which model or device, and
what to do next; it never holds a prompt or a key."""

from __future__ import annotations

from typing import ClassVar, Self

# No package index has this project: anyone may register its name there.
INSTALL_EXTRA = "pip install '.[{}]' in the project's checkout"


class NodeError(Exception):
    """Base of every error raised by the node."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.model: str | None = None
        self.device: str | None = None

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """The error of a part of the request, whose message begins with its name."""
        return cls(f"{param}: {problem}", param=param)


class BadRequest(NodeError):
    """The request is wrong; it would be refused again."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """The prompt of `tokens`, or prompt and output together, fit no placement, which takes at most `limit`."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class RequestBreaksEngine(BadRequest):
    """The request takes down the engine that runs it: it is run no more, and must not be sent to another node."""

    code = "request_breaks_engine"


class UnsupportedParameter(BadRequest):
    """A parameter that the model or device cannot honour; dropping it silently would change the meaning."""

    code = "unsupported_parameter"


class SourceRejected(BadRequest):
    """What a repository, URL or directory holds cannot be made into a model that the node serves."""

    code = "unusable_source"


class Unauthorized(NodeError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(NodeError):
    """The request names another host, or comes from a web page of another site."""

    status = 403
    code = "forbidden"
    type = "permission_error"


class ModelNotFound(NodeError):
    status = 404
    code = "model_not_found"
    type = "not_found_error"


class RouteNotFound(NodeError):
    status = 404
    code = "not_found"
    type = "not_found_error"


class JobNotFound(NodeError):
    """No pull has this id, or it ended long ago."""

    status = 404
    code = "job_not_found"
    type = "not_found_error"


class MethodNotAllowed(NodeError):
    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"


class ModelInUse(NodeError):
    """The model has requests in flight and cannot be removed."""

    status = 409
    code = "model_in_use"
    type = "conflict_error"


class RequestTimeout(NodeError):
    """The client began a request and did not finish sending it in time."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class PayloadTooLarge(NodeError):
    status = 413
    code = "payload_too_large"
    type = "invalid_request_error"


class UnsupportedMediaType(NodeError):
    status = 415
    code = "unsupported_media_type"
    type = "invalid_request_error"


class Retryable(NodeError):
    """The request was sound; another try, here later or on another node, may succeed."""

    status = 503
    code = "unavailable"
    retry_after_default: ClassVar[float] = 1.0

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(
            message, param=param, retry_after=self.retry_after_default if retry_after is None else retry_after
        )


class Overloaded(Retryable):
    """The queue is full, or the predicted wait is longer than the request's deadline."""

    status = 429
    code = "overloaded"
    type = "rate_limit_error"


class EngineUnavailable(Retryable):
    """The engine that held the request died or was killed, or none is ready."""

    code = "engine_unavailable"


class EngineDied(EngineUnavailable):
    """The engine process ended while it held the request, which can be run again."""


class EngineCrashed(EngineDied):
    """The engine crashed or hung while it ran the request, which may be the cause: a client that has seen two of these
    sends the request to no third engine."""

    code = "engine_crashed"


class ModelLoading(Retryable):
    """The model is being loaded and its canary has not passed yet."""

    code = "model_loading"
    retry_after_default = 2.0


class InsufficientMemory(Retryable):
    """The model does not fit the memory budget beside the models that are pinned or in use."""

    code = "insufficient_memory"
    retry_after_default = 5.0


class InsufficientStorage(NodeError):
    """The node's disk has no room for what the request brings."""

    code = "insufficient_storage"
    status = 507


class Draining(Retryable):
    code = "draining"


class DeviceUnavailable(Retryable):
    """The device that the request requires is missing, quarantined or not serving this model."""

    code = "npu_unavailable"
    retry_after_default = 5.0


class NpuNotProven(Retryable):
    """The request requires the NPU, and its busy counter did not move or could not be read."""

    code = "npu_not_proven"


class NotOffered(NodeError):
    """A route that other servers of the dialect have and this node does not."""

    status = 501
    code = "not_implemented"
    type = "invalid_request_error"


class DeadlineExceeded(NodeError):
    """The request's own deadline passed before an answer was complete."""

    status = 504
    code = "deadline_exceeded"
    type = "timeout_error"


class InternalError(NodeError):
    """A bug in the node. Nothing that a client sends may cause it."""


class ConfigurationError(NodeError):
    """Settings, or the files of a model, are wrong: the node refuses to start rather than guess."""


class ModelError(NodeError):
    """Work on model files failed; the store is as it was before."""

    status = 502
    code = "model_error"


class DownloadFailed(ModelError):
    """The source could not be reached, or did not hold the file.

    502 would say that a proxy found no node: clients would ask the next node, and count it against this one.
    """

    status = 424


class HubUnreachable(DownloadFailed):
    """No hub or package index answers: the network's fault, not the node's."""

    code = "hub_unreachable"


class HashMismatch(ModelError):
    """A file is not the one that the catalog names."""


class ConversionFailed(ModelError):
    """The weights could not be turned into a model that OpenVINO runs."""


# What engines and preparation processes report by its code.
_REPORTED: dict[str, type[NodeError]] = {
    error.code: error
    for error in (
        BadRequest,
        ContextLengthExceeded,
        DeadlineExceeded,
        EngineUnavailable,
        InsufficientStorage,
        Overloaded,
        PayloadTooLarge,
        UnsupportedParameter,
    )
}


def reported_error(code: str, message: str, *, param: str | None = None) -> NodeError:
    """The error that another process of the node reported by its code."""
    return _REPORTED.get(code, InternalError)(message, param=param)
