"""The node's HTTP dialect: encodes requests and decodes replies. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from backend_client._protocol.answers import FinishReason, NotAnAnswer, check_vectors
from backend_client._resilience.deadline import Deadline
from backend_client.errors import BadReply, InvalidArgument
from backend_client.results import Timing, Usage

T = TypeVar("T")

_FLOAT32 = np.dtype("<f4")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# What the encoder escapes a text with; for a short text, setting an encoder up takes longer than encoding it.
_TEXT = json.encoder.encode_basestring


@dataclass(slots=True)
class WireCall:
    """One request as it goes to nodes, encoded once for all attempts. `texts` are its prompts, kept out of the repr.

    `model` is the name in the body; a 404 for it is another node's chance. `trace` are further headers. `path` is
    that of an exchange in OpenAI's dialect. `may_wait`: the node may keep it while an engine is restarted; else it is
    refused, and another node is asked.
    """

    encoded: bytes = field(repr=False)
    texts: Sequence[str] = field(repr=False)
    deadline: Deadline
    request_id: str
    model: str | None = None
    priority: str = "interactive"
    require_device: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    path: str = ""
    content_type: str = "application/json"
    refused: Reply | None = None
    may_wait: bool = True

    def headers(self, accept: str) -> dict[str, str]:
        """Its headers; the remaining time is that of this moment."""
        headers = {
            "Content-Type": self.content_type,
            "Accept": accept,
            "X-Request-ID": self.request_id,
            "X-Request-Timeout-Ms": str(self.deadline.remaining_ms()),
        }
        if self.priority != "interactive":
            headers["X-Priority"] = self.priority
        if not self.may_wait:
            headers["X-NPU-Restart-Wait-Ms"] = "0"
        if self.require_device is not None:
            headers["X-NPU-Require-Device"] = self.require_device
        headers.update(self.trace)
        return headers


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply of any status. The names of its headers are in lower case.

    `keyed`: whether the request carried an API key; None where that is not known.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    keyed: bool | None = None


class RouteInfo(NamedTuple):
    """What the headers of an inference reply say."""

    model: str | None
    device: str | None
    reason: str | None
    prompt_tokens: int
    busy_delta_us: int | None
    emulated: bool
    headers: Mapping[str, str] = {}


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
    """The body as JSON. Raises InvalidArgument for what JSON or UTF-8 cannot carry."""
    try:
        return _JSON.encode(body).encode()
    except (TypeError, ValueError):
        pass
    # Raised here and not inside the handler: the error that came up there holds the text.
    raise InvalidArgument("the request has a value that JSON cannot carry, or text that is not Unicode")


def encode_texts(
    texts: Sequence[str],
    model: str | None,
    *,
    truncate: bool,
    input_type: str | None = None,
    dimensions: int | None = None,
) -> bytes:
    """The body of a request to /embeddings, as `encode` would make it."""
    more = ',"truncate":true' if truncate else ""
    if input_type:
        more += f',"input_type":{_TEXT(input_type)}'
    if dimensions is not None:
        more += f',"dimensions":{dimensions}'
    if model:
        more += f',"model":{_TEXT(model)}'
    try:
        return f'{{"texts":[{",".join(map(_TEXT, texts))}]{more}}}'.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidArgument("a text or the model's name is not Unicode")


def route_info(headers: Mapping[str, str]) -> RouteInfo:
    """Read the reply headers; invalid numbers count as missing."""
    found = {name.lower(): value for name, value in headers.items()}
    return RouteInfo(
        found.get("x-model"),
        found.get("x-npu-node-device"),
        found.get("x-npu-node-route-reason"),
        integer(found.get("x-npu-node-token-count")) or 0,
        integer(found.get("x-npu-busy-delta-us")),
        found.get("x-npu-emulated") == "true",
        found,
    )


def embed_reply(node: str, headers: Mapping[str, str], body: bytes | bytearray, expected: int) -> EmbedReply:
    """The vectors of a binary reply to `expected` texts, in its memory where that can be written. Raises BadReply."""
    rows, _, columns = headers.get("X-Shape", "").partition(",")
    count, dimensions = integer(rows), integer(columns)
    space = headers.get("X-Space")
    if count is None or not dimensions or not space:
        raise BadReply("the reply lacks a valid X-Shape or X-Space: this is not a node's /embeddings", node=node)
    if len(body) != count * dimensions * 4:
        raise BadReply(f"{len(body)} bytes came for {count} × {dimensions} float32", node=node)
    # Bytes are copied: an array over them is read-only, and callers normalise in place.
    vectors = np.ndarray((count, dimensions), _FLOAT32, body if isinstance(body, bytearray) else bytearray(body))
    return EmbedReply(read_from(node, check_vectors, vectors, expected), space, route_info(headers))


class _Part(BaseModel):
    # A newer node may say more, and that must not make it unusable.
    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)


class _Tokens(_Part):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Milliseconds(_Part):
    queue: FiniteFloat | None = None
    tokenize: FiniteFloat | None = None
    first_token: FiniteFloat | None = None
    generate: FiniteFloat | None = None
    total: FiniteFloat | None = None


class _Answer(_Part):
    """The body of an answer to /inference, or the data of its last event, as far as the client uses it."""

    model: str
    device: str
    finish_reason: FinishReason
    usage: _Tokens
    timing_ms: _Milliseconds | None = None
    npu_busy_delta_us: int | None = Field(default=None, ge=0)
    emulated: bool = False


def done(node: str, headers: Mapping[str, str], data: Any) -> Done:
    """The reply to a generation without its text. Raises BadReply, which names the fields that are wrong."""
    try:
        answer = _Answer.model_validate(data)
    except ValidationError as error:
        fields = ", ".join(sorted({".".join(map(str, problem["loc"])) or "body" for problem in error.errors()}))
    else:
        # A stream's busy time is known only at its end, so the body is asked before the headers.
        route = route_info(headers)._replace(
            model=answer.model,
            device=answer.device,
            busy_delta_us=answer.npu_busy_delta_us,
            emulated=answer.emulated,
        )
        timing = Timing(**answer.timing_ms.model_dump()) if answer.timing_ms else Timing()
        usage = Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        return Done(route=route, finish_reason=answer.finish_reason, usage=usage, timing=timing)
    raise BadReply(f"the reply lacks a valid {fields}: this is not a node's /inference", node=node)


def read_from(node: str, read: Callable[..., T], *args: Any) -> T:
    """Call a function of `answers`. Raises BadReply of the node, where it raises NotAnAnswer."""
    try:
        return read(*args)
    except NotAnAnswer as error:
        problem = BadReply(str(error), node=node)
    raise problem


def integer(value: str | None) -> int | None:
    """The number that a header holds; None for none, or for what is no number."""
    return int(value) if value is not None and len(value) < 16 and value.isascii() and value.isdigit() else None
