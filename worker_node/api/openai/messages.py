"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from worker_node.api.body import Body
from worker_node.domain import Message, ToolCall
from worker_node.errors import BadRequest


class TextPart(Body):
    """A part of a message: text is the only kind that the models here read."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(Body):
    """Instructions; `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    """What the user said."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class PastCall(Body):
    """A call that the model made; its arguments are JSON in a string."""

    class Function(Body):
        """What was called, and with what."""

        name: str
        arguments: str

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Body):
    """What the model answered."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolMessage(Body):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def conversation(
    messages: Sequence[SystemMessage | UserMessage | AssistantMessage | ToolMessage],
) -> tuple[Message, ...]:
    """The messages as the node has them. Raises BadRequest for arguments that are no object."""
    called: dict[str, str] = {}
    turns: list[Message] = []
    for index, message in enumerate(messages):
        text = text_of(message.content)
        if isinstance(message, AssistantMessage):
            calls = message.tool_calls or []
            called |= {call.id: call.function.name for call in calls}
            turns.append(Message("assistant", text, tuple(_past_call(call, index) for call in calls)))
        elif isinstance(message, ToolMessage):
            turns.append(Message("tool", text, tool_name=message.name or called.get(message.tool_call_id)))
        else:
            turns.append(Message("system" if message.role == "developer" else message.role, text))
    return tuple(turns)


def _past_call(call: PastCall, index: int) -> ToolCall:
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        where = f"messages[{index}].tool_calls"
        raise BadRequest(f"{where}: the arguments of a call are a JSON object in a string", param=where)
    return ToolCall(call.function.name, arguments)


def text_of(content: Content | None) -> str:
    """The text of a content."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
