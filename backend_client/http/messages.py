"""A request as the backends get it, its forms, what the head of its reply says, and a node's report. No I/O."""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from email.message import Message
from email.parser import HeaderParser
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from backend_client.errors import BadReply, InvalidArgument, PayloadTooLarge, RequestRejected
from backend_client.lifetime import Deadline
from backend_client.options import LONGEST_S, NO_FAILOVER, FailoverOptions
from backend_client.results import CallOptions, Priority

T = TypeVar("T")

Vectors = npt.NDArray[np.float32]
_FLOAT32 = np.dtype("<f4")
# A day of a large machine.
_MOST_JOULES = 1e8
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


SpendLimit: TypeAlias = Callable[[Decimal], Awaitable[Callable[[Decimal], None]]]
"""Reserves the most that a call may cost, under a cap that this process shares with others, and returns what to call
once with what it did cost. Raises CloudError where that is above the cap, or the cap cannot be known.
"""


class NotAnAnswer(ValueError):
    """A reply is not an answer to its request; the text says why and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply of any status. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)


def encode(body: Mapping[str, Any]) -> bytes:
    """The body as JSON. Raises InvalidArgument for what JSON or UTF-8 cannot carry."""
    try:
        return _JSON.encode(body).encode()
    except (TypeError, ValueError):
        pass
    # Raised here and not inside the handler: the error that came up there holds the text.
    raise InvalidArgument("the request has a value that JSON cannot carry, or text that is not Unicode")


def read_json(body: bytes | str) -> Any:
    """The value of a JSON text. Halves of surrogate pairs, which no text can hold, are replaced."""
    try:
        text = body if isinstance(body, str) else body.decode("utf-8-sig")
        value = json.loads(text)
        if _HALF.search(text):
            whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(whole.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        pass
    else:
        return value
    # Raised out here: the error that came up there holds the text.
    raise NotAnAnswer("the reply is not JSON")


def read_whole(check: Callable[[Mapping[str, Any], Any], Any], request: Request, reply: Reply) -> tuple[Any, Any]:
    """The body of a reply that came whole, its JSON or its bytes, and what the check of its route reads in it.

    Raises NotAnAnswer.
    """
    if request.path == "/embeddings" and "x-shape" in reply.headers:
        texts = request.body.get("texts")
        return reply.body, binary_vectors(reply, len(texts) if isinstance(texts, list) else 1)
    body: Any = reply.body
    if "json" in reply.headers.get("content-type", ""):
        body = read_json(reply.body)
    return body, check(request.body, body)


def binary_vectors(reply: Reply, count: int | None) -> Vectors:
    """The vectors of a binary reply to `count` texts (None: any number). Raises NotAnAnswer."""
    rows, _, columns = reply.headers.get("x-shape", "").partition(",")
    found, dimensions = integer(rows), integer(columns)
    if found is None or not dimensions or not reply.headers.get("x-space"):
        raise NotAnAnswer("the reply lacks a valid X-Shape or X-Space: this is not a node's /embeddings")
    if len(reply.body) != found * dimensions * 4:
        raise NotAnAnswer(f"{len(reply.body)} bytes came for {found} × {dimensions} float32")
    # Copied: an array over bytes is read-only, and callers normalise in place.
    return check_vectors(np.ndarray((found, dimensions), _FLOAT32, bytearray(reply.body)), count)


def read_from(node: str, read: Callable[..., T], *args: Any) -> T:
    """Call a function of `answers`. Raises BadReply of the node, where it raises NotAnAnswer."""
    try:
        return read(*args)
    except NotAnAnswer as error:
        problem = BadReply(str(error), node=node)
    raise problem


def check_vectors(vectors: Vectors, count: int | None) -> Vectors:
    """The vectors, if there is one with a direction for each of `count` texts (None: any number)."""
    if count is not None and len(vectors) != count:
        raise NotAnAnswer(f"{count} texts were sent, {len(vectors)} vectors came back")
    if len(vectors) and not vectors.shape[1]:
        raise NotAnAnswer("the vectors are empty")
    # In float32, as callers compute it: such vectors compare with no other one.
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        norms = np.einsum("ij,ij->i", vectors, vectors)
        good = (norms > 0) & (norms < np.inf)
    if np.count_nonzero(good) == len(norms):
        return vectors
    if not np.isfinite(norms).all():
        raise NotAnAnswer("the vectors hold NaN or infinity, or have an infinite norm: the device answers garbage")
    raise NotAnAnswer("a vector is all zeros, or so small that its norm is 0: the device answers garbage")


class Costs(NamedTuple):
    """The tokens of the prompt, the busy time of the NPU, and the joules."""

    tokens: int = 0
    busy_us: int | None = None
    joules: float | None = None


def costs(head: Mapping[str, str]) -> Costs:
    """What the head of a reply says that it cost; what is not a number counts as missing."""
    busy, energy = integer(head.get("x-npu-busy-delta-us")), head.get("x-npu-node-joules")
    return Costs(integer(head.get("x-npu-node-token-count")) or 0, busy, joules(energy))


def joules(value: object) -> float | None:
    """The energy that a header or a body names; None if it is absent, or no sum of joules that a request can use."""
    try:
        found = float(value) if isinstance(value, (str, float, int)) and len(str(value)) < 32 else 0.0
    except ValueError:
        return None
    return found if 0 < found < _MOST_JOULES else None


def integer(value: str | None) -> int | None:
    """The number in a header; None if it is absent or not a number."""
    return int(value) if value is not None and len(value) < 16 and value.isascii() and value.isdigit() else None


OWN_IDS = f"req_{random.getrandbits(32):08x}"
"""What the ids begin with that this process makes."""


def new_request_id() -> str:
    """An id as nodes make them: `req_` and 24 hex digits. It must be unlike all others, not hard to guess."""
    return f"{OWN_IDS}{random.getrandbits(64):016x}"


_COMMON = frozenset(CallOptions.__annotations__)
# A body that has one of them means an option of the call, or of the SDK, which would be lost.
_NO_FIELDS = ("local_only", "require_device", "extra_headers", "extra_body", "extra_query")


class KnownSpace(NamedTuple):
    """A vector space, its dimensions, and the most tokens that its model takes; None for what is not known."""

    name: str | None = None
    dimensions: int | None = None
    context_limit: int | None = None


_UNKNOWN_SPACE = KnownSpace()


@dataclass(slots=True, kw_only=True)
class Request:
    """A caller's request, to a node or the cloud.

    `path` is one of `routes.ROUTES`, and `kind` the models that serve it; `model` None: the default of that kind.
    `body` is JSON without `model`; with a `file` (name and bytes) its fields and the file are sent as a form. With
    `content`, of a type, nodes get these very bytes, and `body` is what they say.

    A whole reply must be there by the `deadline`, and a streamed answer must have begun. `ends`: when a streamed answer
    must have ended; without it, it may go on as long as parts come. `space` is what its vectors must be in, where that
    is known. Backends may fill in `model` and `space`.

    `extra_headers` are the caller's, for nodes, and for the cloud where its settings list them; `trace` are those that
    tie a node's spans to the caller's (W3C trace context). `cloud_takes_over`: whether the cloud gets it when no node
    can take it now. `spend_limit`: a cap on what it may cost in the cloud, beside the client's own. `failover`: when
    its answer is given up. `tenant`: on whose behalf a gateway sends it.
    """

    path: str
    deadline: Deadline
    ends: Deadline | None = None
    request_id: str = field(default_factory=new_request_id)
    kind: ModelKind = "generation"
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    file: tuple[str, bytes] | None = field(default=None, repr=False)
    content: bytes | None = field(default=None, repr=False)
    content_type: str = "application/json"
    priority: Priority = "interactive"
    require_device: str | None = None
    local_only: bool = False
    space: KnownSpace = _UNKNOWN_SPACE
    trace: Mapping[str, str] = field(default_factory=dict)
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    cloud_takes_over: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    spend_limit: SpendLimit | None = field(default=None, repr=False, compare=False)
    failover: FailoverOptions = NO_FAILOVER
    tenant: str = ""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a wrong number, or an option of the call among the fields of the body."""
        if self.content is not None:
            return  # the node refuses it in the words of the caller's dialect
        for given in self.body:
            if not isinstance(given, str):
                named = type(given).__name__
                raise InvalidArgument(f"the names of the body's fields must be str, got {named}", param="body")
            # However it is written: `Local_Only` must not get lost either.
            if (name := given.lower().replace("-", "_")) in _NO_FIELDS:
                option = f"give the option {name}" if name in _COMMON else "put its fields into the body itself"
                raise InvalidArgument(f"the body has {given}: {option}", param=name)
        # The fields of a form are texts.
        if self.file is None:
            check_counts(self.body)

    def end_of_stream(self) -> Deadline:
        """When a streamed answer that has begun must have ended: far off where nothing bounds it."""
        return self.ends or Deadline.after(LONGEST_S, self.deadline.clock)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Common options as fields of a Request, and the others."""
    common = {name: value for name, value in options.items() if name in _COMMON and name != "timeout"}
    others = {name: value for name, value in options.items() if name not in _COMMON}
    return common, others


def plain_texts(data: Mapping[str, Any]) -> list[str] | None:
    """The texts of an embedding request that asks for nothing else; None for any other."""
    given = data.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    if {name for name, value in data.items() if value is not None} - {"input", "encoding_format", "user"}:
        return None
    return texts if data.get("encoding_format") in {None, "float", "base64"} else None


@lru_cache(1024)
def plain_name(name: str) -> str:
    """The form in which nodes compare names: lower case, without `:latest`."""
    return name.strip().lower().removesuffix(":latest")


# A wrong one could lift a limit, such as that on costs. All else is for the node, or the cloud, to refuse.
_COUNTS = frozenset({
    "max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "top_n", "dimensions",
})  # fmt: skip


def check_counts(fields: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for a wrong count in the body of a request."""
    for name in fields.keys() & _COUNTS:
        value = fields[name]
        if value is not None and (type(value) is not int or value < 1):
            given = value if type(value) is int and value > -(10**15) else type(value).__name__
            raise InvalidArgument(f"{name} must be a whole number of at least 1, not {given}", param=name)


MOST_BYTES = 512 * 1024 * 1024
"""A longer form is not sent: it is held in memory for the next attempt."""
_MOST_PARTS = 64


def encode_form(fields: Mapping[str, Any], name: str, content: bytes) -> tuple[bytes, str]:
    """A multipart form with the fields (a list: once for each value) and a file; its bytes and its content type."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
        for field, values in fields.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{plain}"\r\n'
    head += "Content-Type: application/octet-stream\r\n\r\n"
    body = b"".join([*parts, head.encode(), content, f"\r\n--{boundary}--\r\n".encode()])
    return body, f"multipart/form-data; boundary={boundary}"


def read_form(body: bytes, content_type: str) -> tuple[dict[str, list[str]], tuple[str, bytes]]:
    """The fields of a form, each with its values, and the name and bytes of its `file`.

    Raises RequestRejected if it is not such a form, PayloadTooLarge for one of more than `MOST_BYTES`.
    """
    if len(body) > MOST_BYTES:
        raise PayloadTooLarge(f"the form has {len(body)} bytes and may have {MOST_BYTES}", status=413)
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise _refused("the body is not multipart/form-data with a boundary")
    before, *parts = (b"\r\n" + body).split(f"\r\n--{boundary}".encode(errors="replace"), _MOST_PARTS)
    if before or not parts or not parts[-1].startswith(b"--"):
        raise _refused(f"the body is not a complete form of less than {_MOST_PARTS} parts")
    fields: dict[str, list[str]] = {}
    file: tuple[str, bytes] | None = None
    for part in parts[:-1]:
        headers, blank, content = part.partition(b"\r\n\r\n")
        found = HeaderParser().parsestr(headers.strip().decode(errors="replace"))
        name = found.get_param("name", header="Content-Disposition")
        if not blank or not isinstance(name, str):
            raise _refused("a part of the form has no name")
        if name == "file" and file is None:
            file = found.get_filename() or "audio", content
            continue
        try:
            fields.setdefault(name, []).append(content.decode())
        except UnicodeDecodeError:
            raise _refused("a field of the form is not UTF-8, or there are two files") from None
    if file is None:
        raise _refused("the form has no file", "file")
    return fields, file


def _refused(why: str, param: str | None = None) -> RequestRejected:
    return RequestRejected(why, status=400, code="invalid_request", param=param)


_IMAGE_PARTS = ("image_url", "input_image", "image")


def writing_kind(body: Mapping[str, Any]) -> ModelKind:
    """The kind of model for a request that asks for text, in any dialect: "vision" where it has an image."""
    if body.get("images"):
        return "vision"
    for items in (body.get("messages"), body.get("input")):
        for item in _list(items):
            if not isinstance(item, Mapping):
                continue
            parts = _list(item.get("content"))
            if item.get("images") or any(
                isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS for part in parts
            ):
                return "vision"
    return "generation"


def _list(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()


ModelKind = Literal["embedding", "generation", "vision", "rerank", "transcription"]
# What errors, tables and logs show of a node: one line, which no terminal takes for a command.
Text = Annotated[str, StringConstraints(max_length=512, pattern="^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$")]
# Both write text, and take chats and prompts; those for vision take images as well.
WRITERS = frozenset({"generation", "vision"})
# What a gateway says that it is, as its `server`.
GATEWAY = "npu-gateway"
SERVING = frozenset({"ready", "degraded"})
# A request to such a model has it loaded, and waits for that.
UNLOADED = "unloaded"
# It is being loaded: for the first time, on demand, or by an engine that is restarted.
LOADING = "loading"


class _Part(BaseModel):
    # A newer node may say more, and that must not make it unusable.
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class DeviceReport(_Part):
    name: Text
    available: bool = False
    emulated: bool = False
    full_name: Text | None = None
    driver: Text | None = None


class Certification(_Part):
    """What the node's passports say of a model on a device, and why.

    It is certified, limited, failed, expired or not certified; None: the node is of a version that says nothing of it.
    """

    device: Text
    emulated: bool = False
    certified: Text | None = None
    certified_reason: Text | None = None


class ModelReport(_Part):
    """One model. `queue_depth` and `in_flight` count requests of all clients. Older nodes do not tell the aliases.

    `ready_in_s`: it is loading, and likely to serve in this many seconds. `kind` is "" for a model that failed before
    it was known. `engines` are the devices that it is placed on, `excluded` those that it may not run on.
    """

    id: Text
    kind: Text
    aliases: tuple[Text, ...] = ()
    state: Text
    device: Text | None = None
    placements: tuple[Text, ...] = ()
    context_limit: int | None = None
    dimensions: int | None = None
    space: Text | None = None
    queue_depth: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    ready_in_s: float | None = Field(default=None, ge=0)
    engines: tuple[Certification, ...] = ()
    excluded: tuple[Certification, ...] = ()

    @field_validator("kind", mode="before")
    @classmethod
    def _unknown(cls, value: object) -> object:
        return "" if value is None else value

    def serves(self, kind: ModelKind) -> bool:
        """Whether requests of that kind are for such a model: images that a model cannot read are for it to refuse."""
        return self.kind in {kind, ""} or (self.kind in WRITERS and kind in WRITERS)

    @cached_property
    def serving(self) -> bool:
        return self.state in SERVING or self.state == UNLOADED

    @cached_property
    def loading(self) -> bool:
        """Whether requests to it wait until it is loaded."""
        return self.state == LOADING

    @cached_property
    def loaded(self) -> bool:
        """Whether it can begin with a request at once."""
        return self.state in SERVING


class HealthReport(_Part):
    """The body of /health. Raises pydantic.ValidationError for anything else.

    `faults` are the faults on demand that the node was started with.
    """

    status: Literal["ready", "degraded", "starting", "draining", "failed"]
    version: Text | None = None
    faults: tuple[Text, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    models: tuple[ModelReport, ...] = ()

    @cached_property
    def serving(self) -> bool:
        """Whether the node takes requests: it is not draining, and some model serves.

        `status` says nothing else about usability: while one model loads, the others serve. A node that hides its
        models (the API key is wrong) is taken at its word, so that its 401 reaches the caller.
        """
        if not self.lists_models:
            return self.status in SERVING
        return self.status != "draining" and any(model.serving for model in self.models)

    @cached_property
    def loading(self) -> bool:
        """Whether the node serves nothing now, and some model is loading."""
        return not self.serving and self.status != "draining" and any(model.loading for model in self.models)

    @cached_property
    def lists_models(self) -> bool:
        """Whether the report has a list of models; without a valid API key it has none."""
        return "models" in self.model_fields_set
