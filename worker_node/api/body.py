"""Reading a request's body: bounded in size and time, then validated into a model of its dialect."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from worker_node.api.arrival import arrival, silence
from worker_node.api.keys import STATE
from worker_node.api.leniency import Ignored, Table, sift
from worker_node.api.problems import explain
from worker_node.api.structure import check_structure
from worker_node.core.errors import BadRequest, PayloadTooLarge, UnsupportedParameter
from worker_node.node import Node

# Of a list whose one item may stand without a list around it.
OneOrMany = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def _stop_at_first_wrong_item(schema: Any) -> None:
    """Stop validating each list of a schema at its first wrong item: an error costs more than a hundred values."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first_wrong_item(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_wrong_item(part)


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

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Return the body that the JSON text holds. Raises pydantic.ValidationError."""
        return cls.model_validate_json(data)


class DialectBody(Body):
    """A body of another server's API, or a part of one, which may hold more fields than this node implements.

    `rules` classifies these other fields; see `leniency`.
    """

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[Table] = {}

    @classmethod
    def read(cls, data: bytes) -> Self:
        """See `Body.read`; raises UnsupportedParameter, BadRequest too."""
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from None
        return cls.model_validate(fields)


B = TypeVar("B", bound=Body)


async def read_body(request: web.Request, model: type[B]) -> B:
    """Return the validated body. Raises BadRequest, PayloadTooLarge, RequestTimeout, DeadlineExceeded."""
    state = request[STATE]
    data = await read_bytes(request, _most_bytes(state.node, images=model.takes_images))
    if not data:
        raise BadRequest("the request has no body; send a JSON object")
    check_structure(data)
    try:
        body = model.read(data)
    except ValidationError as error:
        message, param = explain(error, _parsed(data))
        raise BadRequest(message, param=param) from None
    if isinstance(body, DialectBody):
        ignored = Ignored()
        sift(body, ignored, state.node.settings.unknown_fields)
        state.ignored = ignored
    return body


def limited(request: web.Request, name: str, wanted: int, available: int) -> int:
    """Return `wanted`, or the most that this node offers if that is less; the reply then lists the field as limited.

    Raises UnsupportedParameter where the node is set to refuse such requests.
    """
    if wanted <= available:
        return wanted
    state = request[STATE]
    if state.node.settings.unknown_fields == "reject":
        raise UnsupportedParameter(
            f"{name}: at most {available} can be had here, and the node is set to refuse requests for more "
            '(unknown_fields = "reject")',
            param=name,
        )
    if state.ignored is not None:
        state.ignored.limited[name] = available
    return available


def note_ignored(request: web.Request, name: str) -> None:
    """List a field of a body that was read as ignored: it had no effect on this very request."""
    if (ignored := request[STATE].ignored) is not None:
        ignored.add(name)


def _most_bytes(node: Node, *, images: bool) -> int:
    settings = node.settings
    if not images or all(getattr(model, "pictures", None) is None for model in node.manager.models):
        return settings.max_body_bytes
    return max(settings.max_body_bytes, settings.max_image_body_bytes)


async def read_bytes(request: web.Request, limit: int | None = None) -> bytes:
    """Return the body, of at most `limit` bytes (the node's own limit if None) and within the node's limits of time.

    Raises as `read_body`.
    """
    state = request[STATE]
    if state.dry_run is not None:
        return state.dry_run.body
    settings = state.node.settings
    limit = settings.max_body_bytes if limit is None else limit
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


def _parsed(data: bytes) -> Any:
    """The JSON of a body that failed validation; None if it is not JSON."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
