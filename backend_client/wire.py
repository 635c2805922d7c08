"""The node's HTTP dialect: what goes into a request, and what a reply means. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

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
from backend_client.resilience.deadline import Deadline
from backend_client.results import Timing, Usage
from backend_client.sse import Event

_CODE = re.compile(r"[a-z0-9_.-]{1,64}")
# Errors inside a stream come without a status; these are the ones that their codes have elsewhere, 503 the rest.
_STATUS_OF = {
    "context_length_exceeded": 400,
    "deadline_exceeded": 504,
    "internal_error": 500,
    "invalid_request": 400,
    "overloaded": 429,
    "unsupported_parameter": 400,
}
_NODE_ERRORS = {408: NodeNotServing, 429: NodeOverloaded, 503: NodeNotServing}
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# A message of the node longer than this, or that repeats this much of a prompt, is not one of a node.
_MESSAGE_CHARS = 500
_ECHO_CHARS = 16


@dataclass(slots=True)
class WireCall:
    """One request as it goes to nodes, encoded once for all attempts. `texts` are its prompts, kept out of the repr.

    `model` is the name in the body; a 404 for it is another node's chance.
    """

    encoded: bytes = field(repr=False)
    texts: Sequence[str] = field(repr=False)
    deadline: Deadline
    request_id: str
    model: str | None = None
    priority: str = "interactive"
    require_device: str | None = None

    def headers(self, accept: str) -> dict[str, str]:
        """Its headers; the remaining time is that of this moment."""
        headers = {
            "Content-Type": "application/json",
            "Accept": accept,
            "X-Request-ID": self.request_id,
            "X-Request-Timeout-Ms": str(self.deadline.remaining_ms()),
        }
        if self.priority != "interactive":
            headers["X-Priority"] = self.priority
        if self.require_device is not None:
            headers["X-NPU-Require-Device"] = self.require_device
        return headers


class RouteInfo(NamedTuple):
    """What the headers of an inference reply say."""

    model: str | None
    device: str | None
    reason: str | None
    prompt_tokens: int
    busy_delta_us: int | None
    emulated: bool


@dataclass(slots=True)
class EmbedReply:
    """Vectors, float32 (n, d), and where they were made."""

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str
    route: RouteInfo


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a generation."""

    route: RouteInfo
    finish_reason: str
    usage: Usage
    timing: Timing

    @property
    def model(self) -> str:
        """The model that answered."""
        return self.route.model or ""


def encode(body: Mapping[str, Any]) -> bytes:
    """The body as JSON. Raises RequestRejected for what JSON or UTF-8 cannot carry."""
    try:
        return _JSON.encode(body).encode()
    except (TypeError, ValueError):
        pass
    # Raised here and not inside the handler: the error that came up there holds the text.
    raise RequestRejected("the request has a value that JSON cannot carry, or text that is not Unicode")


def check_texts(texts: Sequence[str]) -> None:
    """Raise RequestRejected, naming the index, for what is not a text."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestRejected(f"texts[{index}] is {type(text).__name__}, not str", param="texts")


def route_info(headers: Mapping[str, str]) -> RouteInfo:
    """Read the reply headers; a number that is none counts as missing."""
    return RouteInfo(
        headers.get("X-Model"),
        headers.get("X-NPU-Node-Device"),
        headers.get("X-NPU-Node-Route-Reason"),
        _integer(headers.get("X-NPU-Node-Token-Count")) or 0,
        _integer(headers.get("X-NPU-Busy-Delta-Us")),
        headers.get("X-NPU-Emulated") == "true",
    )


def embed_reply(node: str, headers: Mapping[str, str], body: bytes, expected: int) -> EmbedReply:
    """The vectors of a binary reply to `expected` texts. Raises BadReply."""
    rows, _, columns = headers.get("X-Shape", "").partition(",")
    count, dimensions = _integer(rows), _integer(columns)
    space = headers.get("X-Space")
    if count is None or dimensions is None or space is None:
        raise BadReply("the reply lacks X-Shape or X-Space: this is not a node's /embeddings", node=node)
    if count != expected:
        raise BadReply(f"{expected} texts were sent, {count} vectors came back", node=node)
    if len(body) != count * dimensions * 4:
        raise BadReply(f"{len(body)} bytes came for {count} × {dimensions} float32", node=node)
    vectors = np.frombuffer(body, "<f4").reshape(count, dimensions)
    if not np.isfinite(vectors).all():
        raise BadReply("the vectors hold NaN or infinity: the device answers garbage", node=node)
    return EmbedReply(vectors, space, route_info(headers))


def done(node: str, headers: Mapping[str, str], data: Any) -> Done:
    """The reply to a generation without its text. Raises BadReply."""
    try:
        usage, timing = data["usage"], data.get("timing_ms") or {}
        # A stream's busy time is known only at its end, so the body is asked before the headers.
        route = route_info(headers)._replace(
            model=str(data["model"]),
            device=str(data["device"]),
            busy_delta_us=data.get("npu_busy_delta_us"),
            emulated=bool(data.get("emulated", False)),
        )
        return Done(
            route=route,
            finish_reason=str(data["finish_reason"]),
            usage=Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])),
            timing=Timing(**{name: timing.get(name) for name in Timing.__dataclass_fields__}),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise BadReply("the reply lacks model, finish_reason or usage: this is not a node's /inference", node=node)


def parse_json(node: str, body: bytes | str) -> Any:
    """JSON from a node. Raises BadReply, which does not quote it."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        pass
    raise BadReply("the reply is not JSON", node=node)


def failure(node: str, status: int, headers: Mapping[str, str], body: bytes, call: WireCall) -> NPUError:
    """The error that a reply other than 200 means."""
    try:
        fields = json.loads(body)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        fields = None
    return _failure(node, status, headers, fields, call)


def stream_item(node: str, headers: Mapping[str, str], event: Event, call: WireCall) -> str | Done:
    """A piece of text, or the end. Raises what an `error` event means, BadReply for any other event."""
    data = parse_json(node, event.data)
    if event.name == "token" and isinstance(data, dict) and isinstance(data.get("text"), str):
        return cast("str", data["text"])
    if event.name == "done":
        return done(node, headers, data)
    if event.name == "error" and isinstance(data, dict):
        fields = data.get("error")
        code = fields.get("code") if isinstance(fields, dict) else None
        raise _failure(node, _STATUS_OF.get(str(code), 503), {}, fields, call)
    raise BadReply("an unknown event came in the stream", node=node)


def _failure(node: str, status: int, headers: Mapping[str, str], fields: object, call: WireCall) -> NPUError:
    known = fields if isinstance(fields, dict) else {}
    message, code, param = known.get("message"), known.get("code"), known.get("param")
    code = code if isinstance(code, str) and _CODE.fullmatch(code) else None
    param = param if isinstance(param, str) and not echoes(param, call.texts) else None
    text = (
        message[:_MESSAGE_CHARS] if isinstance(message, str) and not echoes(message, call.texts) else f"HTTP {status}"
    )
    if status == 404 and code == "model_not_found" and call.model is not None:
        return ModelMissing(text, node=node, status=status, code=code)
    rejected = _rejection(status, code)
    if rejected is not None:
        return rejected(f"{node}: {text}", node=node, status=status, code=code, param=param)
    if status == 504:
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


def echoes(message: str, texts: Sequence[str]) -> bool:
    """Whether a message repeats a text, or a run of one. Nodes never do; a proxy in front of one may."""
    message = message[: 4 * _MESSAGE_CHARS]
    for text in texts:
        if len(text) <= _ECHO_CHARS:
            if len(text) > 3 and text in message:
                return True
        elif any(
            message[start : start + _ECHO_CHARS] in text for start in range(max(0, len(message) - _ECHO_CHARS + 1))
        ):
            return True
    return False


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from retry-after-ms or Retry-After (whole seconds; nodes send no dates)."""
    milliseconds = _integer(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    seconds = _integer(headers.get("Retry-After"))
    return None if seconds is None else float(seconds)


def _integer(value: str | None) -> int | None:
    return int(value) if value is not None and len(value) < 16 and value.isascii() and value.isdigit() else None
