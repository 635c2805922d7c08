"""Whether a request in OpenAI's dialect has images: then a model for vision must answer it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend_client._protocol.report import ModelKind

_IMAGE_PARTS = frozenset({"image_url", "input_image"})


def writing_kind(body: Mapping[str, Any]) -> ModelKind:
    """The kind of model for a chat, a prompt or a request of `/v1/responses`: "vision" where an item has an image."""
    for items in (body.get("messages"), body.get("input")):
        for item in _list(items):
            content = item.get("content") if isinstance(item, Mapping) else None
            if any(isinstance(part, Mapping) and _is_image(part.get("type")) for part in _list(content)):
                return "vision"
    return "generation"


def _is_image(kind: object) -> bool:
    return isinstance(kind, str) and kind in _IMAGE_PARTS


def _list(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()
