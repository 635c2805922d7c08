"""What a reply other than an answer means: status and error object become one of our errors. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from backend_client.errors import (
    AuthenticationFailed,
    BadReply,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelMissing,
    NodeFailed,
    NodeNotServing,
    NodeOverloaded,
    NPUError,
    PayloadTooLarge,
    RequestRejected,
)
from backend_client.wire import integer

_CODE = re.compile(r"[a-z0-9_.-]{1,64}")
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
_NODE_ERRORS = {408: NodeNotServing, 429: NodeOverloaded, 503: NodeNotServing}
# A message of the node longer than this, or that repeats this much of a prompt, is not one of a node.
_MESSAGE_CHARS = 500
_ECHO_CHARS = 16
_WORD_CHARS = 8
# Nodes name at most a minute or two. A proxy that names a year must not take a node out of service for that long.
_LONGEST_PAUSE_S = 300.0


def status_error(
    node: str, status: int, headers: Mapping[str, str], body: bytes, secrets: Sequence[str], model: str | None
) -> NPUError:
    """The error that a reply other than 200 means.

    `secrets` are what no message may repeat: the prompts and the key. `model` is the one that was asked for.
    """
    try:
        fields = json.loads(body)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        fields = None
    return _error(node, status, headers, fields, secrets, model)


def event_error(node: str, data: object, secrets: Sequence[str], model: str | None) -> NPUError:
    """The error that an `error` event in a stream means; such an event has no status."""
    fields = data.get("error") if isinstance(data, dict) else None
    code = fields.get("code") if isinstance(fields, dict) else None
    return _error(node, _STATUS_OF.get(str(code), 503), {}, fields, secrets, model)


def _error(
    node: str,
    status: int,
    headers: Mapping[str, str],
    fields: object,
    secrets: Sequence[str],
    model: str | None,
) -> NPUError:
    known = fields if isinstance(fields, dict) else {}
    message, code, param = known.get("message"), known.get("code"), known.get("param")
    code = code if isinstance(code, str) and _CODE.fullmatch(code) and not echoes(code, secrets) else None
    param = param if isinstance(param, str) and not echoes(param, secrets) else None
    text = f"HTTP {status}"
    if isinstance(message, str) and not echoes(message, secrets):
        text = _printable(message[:_MESSAGE_CHARS])
    if status == 404 and code == "model_not_found" and model is not None:
        return ModelMissing(text, node=node, status=status, code=code)
    rejected = _rejection(status, code)
    if rejected is not None:
        return rejected(f"{node}: {text}", node=node, status=status, code=code, param=param)
    if status == 504 and code == "deadline_exceeded":
        # Any other 504 comes from a proxy that gave up: the call's deadline has not passed.
        return DeadlineExceeded(f"{node}: {text}")
    kind = _NODE_ERRORS.get(status, NodeFailed if status >= 500 else None)
    if kind is not None:
        return kind(text, node=node, status=status, code=code, retry_after=_retry_after(headers))
    return BadReply(f"answered HTTP {status}, which a node never does", node=node, status=status)


def _rejection(status: int, code: str | None) -> type[RequestRejected] | None:
    if not 400 <= status < 500 or status in {408, 429}:
        return None
    if code == "context_length_exceeded":
        return ContextLengthExceeded
    return {401: AuthenticationFailed, 403: AuthenticationFailed, 413: PayloadTooLarge}.get(status, RequestRejected)


def echoes(message: str, secrets: Sequence[str]) -> bool:
    """Whether a message repeats a secret, or a run of one. Nodes never do; a proxy in front of one may."""
    message = message[: 4 * _MESSAGE_CHARS]
    for secret in secrets:
        if len(secret) <= _ECHO_CHARS:
            # A short one may be a word that any message has.
            if len(secret) >= _WORD_CHARS and secret in message:
                return True
        elif any(
            message[start : start + _ECHO_CHARS] in secret for start in range(max(0, len(message) - _ECHO_CHARS + 1))
        ):
            return True
    return False


def _printable(message: str) -> str:
    """One line that any log can take: no line breaks, escape sequences or lone surrogates."""
    return "".join(char if char.isprintable() else " " for char in message)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from retry-after-ms or Retry-After (whole seconds; nodes send no dates), limited."""
    milliseconds = integer(headers.get("retry-after-ms"))
    seconds = integer(headers.get("Retry-After")) if milliseconds is None else milliseconds / 1000
    return None if seconds is None else min(float(seconds), _LONGEST_PAUSE_S)
