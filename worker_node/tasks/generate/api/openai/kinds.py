"""Kinds of content and tools that OpenAI's API has and this node does not: refused with the reason, not as mistakes."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

_IMAGES = frozenset({"image_url", "input_image"})
_MEDIA = {
    "input_audio": "sound",
    "audio_url": "sound",
    "video_url": "films",
    "input_video": "films",
    "file": "files",
    "input_file": "files",
}


def only_text(part: Any) -> Any:
    """The part of a message that may hold text only, as it was sent. Raises PydanticCustomError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _IMAGES:
        reason = "{kind}: images are read in messages of the user only"
        raise PydanticCustomError("unsupported_part", reason, {"kind": kind})
    return text_or_image(part)


def text_or_image(part: Any) -> Any:
    """The part of a message as it was sent. Raises PydanticCustomError for one that no model here reads."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        reason = "{kind}: the models here read text and images, no {media}"
        raise PydanticCustomError("unsupported_part", reason, {"kind": kind, "media": _MEDIA[kind]})
    return part


def only_functions(tool: Any) -> Any:
    """The tool as it was sent. Raises PydanticCustomError for one that the server itself would have to run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        reason = "{kind}: this node runs no tools of its own and takes functions only, which the caller runs"
        raise PydanticCustomError("unsupported_tool", reason, {"kind": kind[:60]})
    return tool
