"""Reading a request's body: bounded in size, time and values, then validated into a model of its dialect.

Errors say where and what was expected there, never what the body holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from worker_node.core.errors import (
    BadRequest,
    DeadlineExceeded,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
    UnsupportedParameter,
)
from worker_node.http.context import STATE, Ignored, deadline_of

MAX_VALUES = 50_000
# Encoders, templates and the walk over a schema each end at some depth with an error of their own; orjson's at 254.
MAX_NESTING = 128
# Token ids cost little to parse and requests may hold many: this many numbers in a row count as one value.
_NUMBERS_AS_ONE = 16

_NUMBERS_AND_BLANKS = b"-0123456789 \t\r\n"

UNKNOWN_ENCODING = "Content-Encoding: gzip, deflate and identity are supported; send the body in one of them"
# What aiohttp decodes; it passes on what it does not know as it is.
_DECODED = ("", "identity", "gzip", "deflate")

_SHOWN = 3
_OBJECTS = frozenset({"model_type", "model_attributes_type"})
_EXPECTED = "Input should be "

_NONE: Mapping[str, int] = {}

# Of a list whose one item may stand without a list around it.
OneOrMany = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def _stop_at_first_wrong_item(schema: Any) -> None:
    """Stop validating a list at its first wrong item: an error costs more than a hundred values."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first_wrong_item(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_wrong_item(part)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that would change the answer and is not implemented here, for this reason.

    Values that ask for nothing pass: null, false, 0, an empty string, list or object, and the `neutral` values.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


Table = Mapping[str, Unsupported]


class Body(BaseModel):
    """A request body: no coercion of types, no infinities, no unknown fields.

    One that `takes_images` may be larger than others while a model with vision is served.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    takes_images: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_wrong_item(schema)
        return schema


class DialectBody(Body):
    """A body of another server's API, or a part of one, which may have fields that it does not declare.

    Its `rules` name those that would change the answer: they are refused, except at values that ask for nothing. Others
    are ignored and listed in the reply, or refused where the node is strict (`unknown_fields = "reject"`).
    """

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[Table] = {}


B = TypeVar("B", bound=Body)


async def read_body(request: web.Request, model: type[B]) -> B:
    """Return the validated body. Raises BadRequest, PayloadTooLarge, RequestTimeout, DeadlineExceeded."""
    state = request[STATE]
    limit = state.node.settings.max_body_bytes
    small = request.content.is_eof() and request.content.total_bytes <= limit
    if model.takes_images and not small and any(getattr(one, "images", None) for one in state.node.manager.models):
        limit = max(limit, state.node.settings.max_image_body_bytes)

    data = await read_bytes(request, limit)
    if not data:
        raise BadRequest("the request has no body; send a JSON object")
    check_structure(data)
    try:
        fields = orjson.loads(data)
        if _opened(data) > MAX_NESTING and nested_deeper(fields, MAX_NESTING):
            raise BadRequest(f"the body is nested more than {MAX_NESTING} levels deep; send flatter objects and lists")
        body = model.model_validate(fields)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValidationError as error:
        message, param = explain(error, fields)
        raise BadRequest(message, param=param) from None

    if isinstance(body, DialectBody):
        ignored = Ignored()
        sift(body, ignored, state.node.settings.unknown_fields)
        state.ignored = ignored
    return body


def note_effects(request: web.Request, ignored: Iterable[str] = (), limited: Mapping[str, int] = _NONE) -> None:
    """List parts of a request that have no effect, or, with what is available, those that asked for more.

    Raises UnsupportedParameter where the node is strict.
    """
    state = request[STATE]
    problems = dict.fromkeys(ignored, "it has no effect on this request; leave it out")
    # Bodies of the native API list nothing.
    if state.ignored is not None:
        problems |= {name: f"at most {most} are available here" for name, most in limited.items()}
    for name, problem in problems.items():
        if state.node.settings.unknown_fields == "reject":
            raise UnsupportedParameter(f'{name}: {problem} (the node is set to unknown_fields = "reject")', param=name)
        if state.ignored is None:
            continue
        if name in limited:
            state.ignored.limited[name] = limited[name]
        else:
            state.ignored.add(name)


def reject_required_device(fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedParameter for the node's own header sent as a field: a demand is never ignored."""
    if fields.get("require_device"):
        raise UnsupportedParameter(
            "require_device: it is no field of this request; send it as the header X-NPU-Require-Device",
            param="require_device",
        )


def sift(body: BaseModel, ignored: Ignored, mode: Literal["ignore", "reject"], where: str = "") -> None:
    """Judge each undeclared field of a validated body, or of its part at `where`. Raises UnsupportedParameter."""
    if not where:
        reject_required_device(body.model_extra or {})
    rules: Table = getattr(body, "rules", {})
    for name, value in (body.model_extra or {}).items():
        path = f"{where}{name}"
        shown = path[:200]
        if (rule := rules.get(name)) is not None:
            if value and value not in rule.neutral:
                raise UnsupportedParameter(f"{shown}: {rule.reason}", param=shown)
        elif mode == "reject":
            raise UnsupportedParameter(
                f"{shown}: it has no effect here, and the node is set to refuse such fields "
                '(unknown_fields = "reject"); leave it out',
                param=shown,
            )
        elif value is not None:
            ignored.add(path)
    # What was not sent is a default and holds nothing of the client's.
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            sift(value, ignored, mode, f"{where}{name}.")
        elif isinstance(value, list) and value and not isinstance(value[0], str | int):
            for part in value:
                if isinstance(part, BaseModel):
                    sift(part, ignored, mode, f"{where}{name}.")


def check_encoding(request: web.Request) -> None:
    """The check of each request: raises UnsupportedMediaType for a body in an encoding that is not decoded here."""
    if request.headers.get("Content-Encoding", "").lower() not in _DECODED:
        raise UnsupportedMediaType(UNKNOWN_ENCODING)


async def expect_continue(_request: web.Request) -> None:
    """Send no `100 Continue` yet: `arrival` does, so that refusals before it cost no upload."""


async def read_bytes(request: web.Request, limit: int | None = None) -> bytes:
    """Return the body, of at most `limit` bytes (the node's own limit if None). Raises as `read_body`."""
    limit = request[STATE].node.settings.max_body_bytes if limit is None else limit
    if (request.content_length or 0) > limit:
        raise PayloadTooLarge(f"the body has {request.content_length} bytes and may have {limit}")
    if request.content.is_eof() and request.content.exception() is None and request.content.total_bytes <= limit:
        # It came with the header, as most do: there is nothing to wait for.
        return request.content.read_nowait()

    chunks: list[bytes] = []
    size = 0
    try:
        async with arrival(request):
            while True:
                async with silence(request):
                    chunk = await request.content.readany()
                if not chunk:
                    return b"".join(chunks)
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise PayloadTooLarge(f"the body has more than the {limit} bytes that it may have")
    except RuntimeError:
        if request.transport is not None:
            raise
        raise ConnectionResetError("the client left before its body was read") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is not framed or encoded as its headers say") from None


@asynccontextmanager
async def arrival(request: web.Request) -> AsyncIterator[None]:
    """Ask for the body, which is read in this block, and bound its time.

    Raises RequestTimeout when the sender falls silent, and DeadlineExceeded when the request's deadline passes first:
    a byte now and then holds a connection no longer.
    """
    deadline = deadline_of(request)
    if request.version >= (1, 1) and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Not part of the reply, which aiohttp takes for begun otherwise.
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())) as scope:
            yield
    except TimeoutError:
        # Not by the clock: a loop's timers end up to a millisecond early.
        if scope.expired():
            raise DeadlineExceeded("the request's time was up before its body had arrived") from None
        limit = request[STATE].node.settings.body_timeout_s
        raise RequestTimeout(f"the body stopped arriving for {limit:g} s") from None


def silence(request: web.Request) -> asyncio.Timeout:
    """The limit on the wait for the next piece of a body."""
    return asyncio.timeout(request[STATE].node.settings.body_timeout_s)


def check_structure(data: bytes) -> None:
    """Raise PayloadTooLarge for a JSON text of too many values, in time that is linear in its bytes.

    Sixteen whole numbers in a row count as one. Parsing and validating cost by the value, not by the byte: eight
    megabytes of empty lists or of wrong items take half a minute of the event loop, which serves nobody else meanwhile.
    """
    if _opened(data) + data.count(b",") <= MAX_VALUES:
        return
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value is a string or not, and may have a name: two quotes each.
    count = unescaped.count(b'"') // 4
    if count <= MAX_VALUES:
        outside = b"s".join(unescaped.split(b'"')[::2])
        marks = outside.translate(None, _NUMBERS_AND_BLANKS)
        runs = marks.count(b"," * _NUMBERS_AS_ONE)
        # What is left of each run.
        rest = marks.replace(b"," * _NUMBERS_AS_ONE, b"").replace(b",,,,", b",")
        count = _opened(marks) + runs + rest.count(b",")
    if count > MAX_VALUES:
        raise PayloadTooLarge(
            f"the body holds more than the {MAX_VALUES} values that it may hold, lists, objects and fields included; "
            "send it in several requests"
        )


def nested_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects of a JSON value stand in each other more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for parts in inner for part in parts]
    return any(isinstance(one, dict | list) for one in level)


def _opened(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


# Keys and indices of the body, and what is wrong there.
Problem = tuple[tuple[int | str, ...], str]


def explain(error: ValidationError, body: Any) -> tuple[str, str | None]:
    """Return the message, and the path of the first problem.

    Where a field may have several forms, pydantic lists the problems of each. Those of one form are reported: of the
    forms that fit deepest into the value, the one with the fewest problems.
    """
    forms: dict[tuple[str, ...], list[Problem]] = {}
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        path, form = _located(found["loc"], body, missing=found["type"] == "missing")
        # Pydantic's own message names a class of ours.
        message = f"{_EXPECTED}an object" if found["type"] in _OBJECTS else found["msg"]
        forms.setdefault(form, []).append((path, message))
    problems = forms.pop((), [])
    if forms:
        nearest = max(forms.values(), key=lambda ones: (max(len(path) for path, _ in ones), -len(ones)))
        (first, message), *rest = nearest
        # What any form expects in that place.
        here = [other for ones in forms.values() for path, other in ones if path == first and other != message]
        expected = dict.fromkeys([message, *(other.removeprefix(_EXPECTED) for other in here)])
        problems += [(first, " or ".join(expected)), *rest]
    parts = [f"{where}: {message}" if (where := _name(path)) else message for path, message in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        parts.append(f"and {len(problems) - _SHOWN} more problems")
    return "; ".join(parts), _name(problems[0][0]) or None


def _located(
    location: Sequence[int | str], body: Any, *, missing: bool
) -> tuple[tuple[int | str, ...], tuple[str, ...]]:
    """Take the names of forms out of a location: parts that are not keys or indices of the body."""
    path: list[int | str] = []
    forms: list[str] = []
    here = body
    for number, part in enumerate(location):
        inside = isinstance(here, dict) and part in here
        inside = inside or (isinstance(here, list) and isinstance(part, int) and part < len(here))
        if inside or (missing and number == len(location) - 1):
            path.append(part)
            here = here[part] if inside else None
        else:
            forms.append(str(part))
    return tuple(path), tuple(forms)


def _name(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:100]}" if path else part[:100]
    return path
