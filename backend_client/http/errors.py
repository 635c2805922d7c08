"""Replies other than answers as errors of the client, and its errors as replies in OpenAI's form. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from backend_client.errors import (
    AuthenticationFailed,
    BadReply,
    ClientClosed,
    ConfigurationError,
    ContextLengthExceeded,
    DeadlineExceeded,
    FleetOverloaded,
    KeyRefused,
    ModelMissing,
    NodeFailed,
    NodeNotServing,
    NodeOverloaded,
    NPUError,
    PayloadTooLarge,
    RequestRejected,
    SpendCapReached,
)
from backend_client.http.messages import Reply, integer

# What each code of a node means, in our words: no text of a reply gets into an error, because a proxy in front of a
# node may echo the prompt or the key.
_MEANINGS = {
    "context_length_exceeded": "the prompt, or prompt and output together, are longer than the model's context",
    "deadline_exceeded": "the deadline passed on the node; increase `timeout` or send less",
    "draining": "the node is shutting down and takes no new requests",
    "engine_crashed": "the engine of the model crashed or hung while it ran this request",
    "engine_unavailable": "the engine of the model died, hung, or is not ready yet",
    "forbidden": "the node does not serve this host name or origin; call it by the name or address that it listens on",
    "hub_unreachable": "the node reaches no hub to get the model from",
    "insufficient_memory": "the model does not fit the memory of the node beside the models in use",
    "internal_error": "internal error of the node; its log has the details under the request id",
    "invalid_api_key": "the API key is missing or wrong; check NPU_CLIENT_API_KEY (or api_key)",
    "invalid_request": "the request is invalid",
    "method_not_allowed": "the node has this URL, but not with this method",
    "model_error": "the model's files could not be prepared",
    "model_in_use": "the model has requests in flight and cannot be removed",
    "model_loading": "the model is loading",
    "model_not_found": "the node does not serve this model",
    "not_found": "the node has no such URL; it may be older than this client",
    "not_implemented": "the node does not offer this",
    "npu_not_proven": "the NPU was required, and its busy counter does not show that it ran",
    "npu_unavailable": "the required device is not available now",
    "overloaded": "the node is busy",
    "payload_too_large": "the request is larger than the node accepts",
    "request_breaks_engine": "the request takes down the engine that runs it; do not send it again",
    "request_timeout": "the request was not sent completely in time",
    "unavailable": "the node cannot take the request now",
    "unsupported_parameter": "a parameter is not supported by the model or its device",
}
# Names that a `param` may hold, by their first part: `messages[0].content` becomes `messages`.
_PARAMS = frozenset({
    "audio", "best_of", "dimensions", "documents", "echo", "encoding_format", "file", "format", "frequency_penalty",
    "function_call", "functions", "ignore_eos", "images", "include", "input", "input_type", "instructions",
    "keep_alive", "language", "logit_bias", "logprobs", "max_completion_tokens", "max_new_tokens", "max_output_tokens",
    "max_tokens", "messages", "metadata", "min_p", "min_tokens", "modalities", "model", "n", "n_predict", "options",
    "parallel_tool_calls",
    "prediction", "presence_penalty", "previous_response_id", "prompt", "query", "raw", "reasoning_effort",
    "repetition_penalty", "response_format", "seed", "service_tier", "stop", "stop_token_ids", "store", "stream",
    "stream_options", "suffix", "temperature", "text", "texts", "tokens", "tool_choice", "tools", "top_k",
    "top_logprobs", "top_n", "top_p", "truncate", "use_beam_search", "user", "web_search_options",
})  # fmt: skip
# Errors inside a stream come without a status; these are the ones that their codes have elsewhere, 503 the rest.
_STATUS_OF = {
    "context_length_exceeded": 400,
    "deadline_exceeded": 504,
    "internal_error": 500,
    "invalid_request": 400,
    "overloaded": 429,
    "request_breaks_engine": 400,
    "unsupported_parameter": 400,
}
_NODE_ERRORS = {408: NodeNotServing, 429: NodeOverloaded, 503: NodeNotServing, 529: NodeNotServing}
# What these mean does not depend on who answers: a wrong key, a slow or large request, a rate limit. Any other 4xx
# comes from a node only if it has the error body of one.
_MEANT_BY_ANYBODY = frozenset({401, 403, 408, 413, 429})
_CODES = {401: "invalid_api_key", 404: "model_not_found", 413: "payload_too_large"}
# Nodes name at most a minute or two. A proxy that names a year must not take a node out of service for that long.
_LONGEST_PAUSE_S = 300.0


def status_error(node: str, reply: Reply, model: str | None, dialect: str = "openai") -> NPUError:
    """The error that a reply other than 200 means; it has the reply. `model` is the one that was asked for."""
    status, body, fields = reply.status, None, None
    try:
        body = json.loads(reply.body)
        fields = body["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    if dialect != "openai" and fields is not None and 400 <= status < 500:
        fields = _in_openai_form(status, _described(fields, body))
    if 400 <= status < 500 and status not in _MEANT_BY_ANYBODY and not _of_a_node(fields):
        why = "without the error body of a node; check the address, and the proxy if there is one"
        error: NPUError = BadReply(f"answered HTTP {status} {why}", node=node, status=status)
    else:
        error = _error(node, status, reply.headers, _described(fields, body), model)
    error.reply = reply
    return error


def _in_openai_form(status: int, fields: Any) -> dict[str, Any]:
    """A refusal in another dialect as OpenAI's has it, whether it names a code, as a node's does, or not."""
    code = fields.get("code") if isinstance(fields, dict) else None
    return {"message": "", "type": "", "code": code or _CODES.get(status, "invalid_request"), "param": None}


def event_error(node: str, data: object, model: str | None) -> NPUError:
    """The error that an `error` event in a stream means; such an event has no status."""
    fields = _described(data.get("error") if isinstance(data, dict) else None, data)
    code = fields.get("code") if isinstance(fields, dict) else None
    return _error(node, _STATUS_OF.get(str(code), 503), {}, fields, model)


def _described(error: object, beside: object) -> object:
    """What describes an error: in Ollama's form it is a text, and its code stands `beside` it."""
    return beside if isinstance(error, str) else error


def _error(node: str, status: int, headers: Mapping[str, str], fields: object, model: str | None) -> NPUError:
    known = fields if isinstance(fields, dict) else {}
    given, param = known.get("code"), _param(known.get("param"))
    code = given if isinstance(given, str) and given in _MEANINGS else None
    text = f"HTTP {status}" if code is None else f"{_MEANINGS[code]} (HTTP {status}, {code})"
    if param is not None:
        text += f"; check {param}"
    if status in {401, 403}:
        if code is None:
            text += " without the error body of a node; check NPU_CLIENT_API_KEY, and the proxy if there is one"
        return KeyRefused(text, node=node, status=status, code=code)
    if status == 404 and code == "model_not_found" and model is not None:
        return ModelMissing(text, node=node, status=status, code=code)
    if 400 <= status < 500 and status not in {408, 429}:
        rejected = PayloadTooLarge if status == 413 else RequestRejected
        rejected = ContextLengthExceeded if code == "context_length_exceeded" else rejected
        return rejected(f"{node}: {text}", node=node, status=status, code=code, param=param)
    if status == 504 and code == "deadline_exceeded":
        # Any other 504 comes from a proxy that gave up: the call's deadline has not passed.
        return DeadlineExceeded(f"{node}: {text}")
    kind = _NODE_ERRORS.get(status, NodeFailed if status >= 500 else None)
    if kind is not None:
        return kind(text, node=node, status=status, code=code, retry_after=retry_after_of(headers))
    return BadReply(f"answered HTTP {status}, which a node never does", node=node, status=status)


def _of_a_node(fields: object) -> bool:
    """Whether this is the `error` object of a node: `{"message", "type", "code", "param"}`."""
    return isinstance(fields, dict) and all(
        isinstance(fields.get(name, ...), str | None) for name in ("message", "type", "code", "param")
    )


def _param(value: object) -> str | None:
    """The name of a parameter that requests have, without what follows it; None for anything else."""
    name = re.split(r"[.\[]", value, maxsplit=1)[0] if isinstance(value, str) else None
    return name if name in _PARAMS else None


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds, from retry-after-ms or retry-after (whole seconds; nodes send no dates), limited."""
    milliseconds = integer(headers.get("retry-after-ms"))
    seconds = integer(headers.get("retry-after")) if milliseconds is None else milliseconds / 1000
    return None if seconds is None else min(float(seconds), _LONGEST_PAUSE_S)


class Problem(Exception):
    """An error as a reply says it, in any dialect."""

    def __init__(
        self, status: int, code: str, message: str, retry_after: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after, self.param = status, code, message, retry_after, param


def problem_of(error: NPUError) -> Problem:
    """The HTTP error that reports an error of the client."""
    found = Problem(503, "unavailable", error.message, getattr(error, "retry_after", None))
    if isinstance(error, FleetOverloaded):
        # It is worth waiting for a node, whatever the cloud said.
        found.status, found.code = 429, "overloaded"
    elif isinstance(getattr(error, "cloud_error", error), SpendCapReached):
        found = Problem(402, "spend_cap_reached", error.message)
    elif isinstance(error, DeadlineExceeded):
        found = Problem(504, "deadline_exceeded", error.message)
    elif isinstance(error, AuthenticationFailed):
        found = Problem(401, error.code or "invalid_api_key", error.message)
    elif isinstance(error, RequestRejected):
        found = Problem(error.status or 400, error.code or "invalid_request", error.message, param=error.param)
    elif isinstance(error, ConfigurationError) and not isinstance(error, ClientClosed):
        # The request names no model, and the fleet has several.
        found = Problem(400, "invalid_request", error.message, param="model")
    return found


def refusal_of_node(error: NPUError) -> Reply | None:
    """A node's refusal of a request as it came, where the error is one: for callers who speak the node's dialect."""
    reply = error.reply if isinstance(error, RequestRejected) else None
    return reply if isinstance(reply, Reply) and 400 <= reply.status < 500 else None


def openai_error(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}
