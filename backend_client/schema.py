"""Pydantic models as the form of an answer: their schema in the request, their validation of the reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from backend_client.errors import InvalidAnswer, InvalidArgument
from backend_client.results import ChatResult

M = TypeVar("M", bound=BaseModel)

_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_INCOMPLETE = {
    "length": "it was cut: increase max_tokens",
    "model_length": "it was cut where the model's context ends",
    "content_filter": "it was filtered",
}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def is_model(value: object) -> bool:
    """Whether it is a pydantic model (the class)."""
    return isinstance(value, type) and issubclass(value, BaseModel)


def model_class(value: object) -> type[BaseModel]:
    """Raises InvalidArgument for anything but a pydantic model."""
    if not is_model(value):
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        raise InvalidArgument(f"schema is {kind}; give a pydantic model (the class)", param="schema")
    return value  # type: ignore[return-value]


def response_format(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAI's `response_format` for a model: all its fields, and no others."""
    name = _NOT_IN_NAMES.sub("_", model.__name__)[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": closed(model.model_json_schema())}}


def closed(schema: Any) -> Any:
    """The schema with every object closed and every property required, as strict servers demand."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {name: value for name, value in schema.items() if name != "default"}
    for name in _SCHEMAS:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: closed(value) for key, value in found[name].items()}
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [closed(value) for value in found[name]]
    for name in ("items", "additionalProperties", "not"):
        if name in found:
            found[name] = closed(found[name])
    if isinstance(found.get("properties"), Mapping):
        found["required"] = list(found["properties"])
        found.setdefault("additionalProperties", False)
    return found


def validated(model: type[M], result: ChatResult) -> M | None:
    """The answer as an object of the model; None where it calls tools. Raises InvalidAnswer, which holds the text.

    Also for one that was cut or filtered: as in OpenAI's SDK it is no answer even if it happens to match.
    """
    reason = next((each.finish_reason for each in result.choices if each.finish_reason in _INCOMPLETE), None)
    hint = _INCOMPLETE.get(reason or "")
    if hint is None:
        if result.tool_calls or result.finish_reason == "tool_calls":
            return None
        try:
            return model.model_validate_json(result.text)
        except ValidationError as error:
            wrong = error.errors(include_input=False, include_url=False, include_context=False)
            where = sorted({".".join(map(str, problem["loc"])) or "the whole" for problem in wrong})[:5]
        hint = f"wrong: {', '.join(where)}"
    raise InvalidAnswer(
        f"the answer of {result.model} is not a valid {model.__name__}; {hint}",
        text=result.text,
        finish_reason=reason or result.finish_reason,
        attempts=result.attempts,
        request_id=result.request_id,
    )
