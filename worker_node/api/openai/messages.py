"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from worker_node.api.body import Body
from worker_node.domain import Message


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


class AssistantMessage(Body):
    """What the model answered."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


def domain_message(message: Any) -> Message:
    """The message as the node has it; parts of text are one text."""
    role = "system" if message.role == "developer" else message.role
    return Message(role, text_of(message.content))


def text_of(content: Content | None) -> str:
    """The text of a content."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
