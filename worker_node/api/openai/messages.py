"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field

from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table
from worker_node.api.openai.kinds import only_text
from worker_node.api.openai.table import MESSAGE
from worker_node.domain import Message, ToolCall


class TextPart(DialectBody):
    """A part of a message: text is the only kind that the models here read."""

    type: Literal["text"]
    text: str


Content = str | list[Annotated[TextPart, BeforeValidator(only_text)]]


class SystemMessage(DialectBody):
    """Instructions; `developer` is OpenAI's newer word for `system`."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["system", "developer"]
    content: Content


class UserMessage(DialectBody):
    """What the user said."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["user"]
    content: Content


class PastCall(DialectBody):
    """A call that the model made; its arguments are JSON in a string."""

    class Function(DialectBody):
        """What was called, and with what."""

        name: str
        arguments: str

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(DialectBody):
    """What the model answered."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    reasoning_content: str | None = None


class ToolMessage(DialectBody):
    """What a called function returned."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def conversation(
    messages: Sequence[SystemMessage | UserMessage | AssistantMessage | ToolMessage],
) -> tuple[Message, ...]:
    """The messages as the node has them."""
    called: dict[str, str] = {}
    turns: list[Message] = []
    for message in messages:
        text = text_of(message.content)
        if isinstance(message, AssistantMessage):
            calls = message.tool_calls or []
            called |= {call.id: call.function.name for call in calls}
            past = tuple(ToolCall(call.function.name, past_arguments(call.function.arguments)) for call in calls)
            turns.append(Message("assistant", text, past))
        elif isinstance(message, ToolMessage):
            turns.append(Message("tool", text, tool_name=message.name or called.get(message.tool_call_id)))
        else:
            turns.append(Message("system" if message.role == "developer" else message.role, text))
    return tuple(turns)


def past_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a call that a model made. They may be cut off or malformed: then the template shows the text."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def text_of(content: Content | None) -> str:
    """The text of a content."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
