"""vLLM's parameters of a conversation's rendering: the template's own variables, and where the prompt ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from worker_node.core.errors import BadRequest
from worker_node.core.types import Rendering

_MAX_BYTES = 8192
_MAX_DEPTH = 4
# What the node itself hands to the template.
_RESERVED = frozenset({"add_generation_prompt", "bos_token", "chat_template", "eos_token", "messages", "tools"})


def rendering(
    variables: Mapping[str, Any] | None, *, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> Rendering:
    """How the conversation is rendered. Raises BadRequest."""
    if continue_final_message and add_generation_prompt:
        raise BadRequest(
            "continue_final_message: the prompt ends either with the last message or where a new one begins; leave "
            "add_generation_prompt out",
            param="continue_final_message",
        )
    return Rendering(
        _checked(variables or {}),
        answer_prompt=add_generation_prompt is not False,
        continue_last=bool(continue_final_message),
    )


def _checked(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        raise BadRequest(f"chat_template_kwargs: {taken[0]} is set by the node", param="chat_template_kwargs")
    if len(orjson.dumps(variables)) > _MAX_BYTES or _deeper(variables, _MAX_DEPTH):
        raise BadRequest(
            f"chat_template_kwargs: at most {_MAX_BYTES} bytes of JSON, nested at most {_MAX_DEPTH} deep",
            param="chat_template_kwargs",
        )
    return variables


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(part, levels - 1) for part in inner if isinstance(part, dict | list))
