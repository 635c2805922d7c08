"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field

from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table
from worker_node.core.types import Message, Picture, ToolCall
from worker_node.tasks.generate.api.openai.kinds import only_text, text_or_image
from worker_node.tasks.generate.api.openai.table import MESSAGE
from worker_node.tasks.generate.api.pictures import picture_of_url


class TextPart(DialectBody):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(DialectBody):
    """A part of a message that is a picture; `detail` is a hint for models that see in several resolutions."""

    class Url(DialectBody):
        """The picture itself, as a data URL."""

        url: str
        detail: str | None = None

    type: Literal["image_url"]
    image_url: Url


Content = str | list[Annotated[TextPart, BeforeValidator(only_text)]]
Part = Annotated[TextPart | ImagePart, Field(discriminator="type"), BeforeValidator(text_or_image)]


class SystemMessage(DialectBody):
    """Instructions; `developer` is OpenAI's newer word for `system`."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["system", "developer"]
    content: Content


class UserMessage(DialectBody):
    """What the user said."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["user"]
    content: str | list[Part]


class PastCall(DialectBody):
    """A call that the model made; its arguments are JSON in a string."""

    class CalledFunction(DialectBody):
        """What was called, and with what."""

        name: str
        arguments: str

    id: str
    type: Literal["function"]
    function: CalledFunction


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
    """The messages as the node has them. Raises BadRequest, PayloadTooLarge for a picture."""
    called: dict[str, str] = {}
    turns: list[Message] = []
    for number, message in enumerate(messages):
        if isinstance(message, UserMessage):
            text, pictures = _parts(message.content, f"messages[{number}].content")
            turns.append(Message("user", text, pictures=pictures))
            continue
        text = text_of(message.content)
        if isinstance(message, AssistantMessage):
            calls = message.tool_calls or []
            called |= {call.id: call.function.name for call in calls}
            past = tuple(ToolCall(call.function.name, past_arguments(call.function.arguments)) for call in calls)
            turns.append(Message("assistant", text, past))
        elif isinstance(message, ToolMessage):
            turns.append(Message("tool", text, tool_name=message.name or called.get(message.tool_call_id)))
        else:
            turns.append(Message("system", text))
    return tuple(turns)


def _parts(content: str | Sequence[TextPart | ImagePart], where: str) -> tuple[str, tuple[Picture, ...]]:
    """The text of a content, and the pictures in it."""
    if isinstance(content, str):
        return content, ()
    text, pictures = "", []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            text += part.text
        else:
            pictures.append(picture_of_url(part.image_url.url, len(text), f"{where}[{number}].image_url.url"))
    return text, tuple(pictures)


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
