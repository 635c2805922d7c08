"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from worker_node.core.errors import BadRequest
from worker_node.http.body import MAX_NESTING, DialectBody, nested_deeper
from worker_node.http.leniency import Table
from worker_node.tasks.generate.http.fields import MESSAGE, only_text, text_or_image
from worker_node.tasks.generate.images import image_of_url
from worker_node.tasks.generate.request import AnswerSchema, Image, Message, Tool, ToolCall, ToolUse


class TextPart(DialectBody):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(DialectBody):
    """A part of a message that is an image; `detail` is a hint for models that see in several resolutions."""

    class Url(DialectBody):
        """The image itself, as a data URL."""

        url: str
        detail: str | None = None

    type: Literal["image_url"]
    # Some clients, and OpenAI's own older examples, write the URL alone.
    image_url: Annotated[Url, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]


class RefusalPart(DialectBody):
    """A part of an earlier answer in which a model declined; it is text, too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What the model said."""
        return self.refusal


class ResponsesTextPart(DialectBody):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponsesImagePart(DialectBody):
    """A part of a message that is an image, as a data URL; `detail` is a hint. Files are not kept here."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


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
        name: str
        arguments: str

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(DialectBody):
    """What the model answered."""

    rules: ClassVar[Table] = MESSAGE

    role: Literal["assistant"]
    content: (
        str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type"), BeforeValidator(only_text)]] | None
    ) = None
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
    """The messages as the node has them. Raises BadRequest, PayloadTooLarge for an image."""
    called: dict[str, str] = {}
    turns: list[Message] = []
    for number, message in enumerate(messages):
        if isinstance(message, UserMessage):
            text, images = text_and_images(message.content, f"messages[{number}].content")
            turns.append(Message("user", text, images=images))
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


AnyPart = TextPart | ImagePart | RefusalPart | ResponsesTextPart | ResponsesImagePart


def text_and_images(content: str | Sequence[AnyPart], where: str) -> tuple[str, tuple[Image, ...]]:
    """The text of a content, and the images in it."""
    if isinstance(content, str):
        return content, ()
    text, images = "", []
    for number, part in enumerate(content):
        match part:
            case ImagePart(image_url=image):
                images.append(image_of_url(image.url, len(text), f"{where}[{number}].image_url.url"))
            case ResponsesImagePart(image_url=url):
                images.append(image_of_url(url, len(text), f"{where}[{number}].image_url"))
            case _:
                text += part.text
    return text, tuple(images)


def past_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a call that a model made. They may be cut off or malformed: then the template shows the text."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    usable = isinstance(arguments, dict) and not nested_deeper(arguments, MAX_NESTING)
    return arguments if usable else {"INVALID_JSON": text}


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """The text of a content that holds nothing else."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Tools, the choice among them, and the form of the answer, as OpenAI's bodies write them.

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionFields(DialectBody):
    """A function, what it does, and the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(DialectBody):
    """A function that the model may ask to be called."""

    class OfferedFunction(FunctionFields):
        name: ToolName
        strict: bool | None = None

    type: Literal["function"]
    function: OfferedFunction


class OtherTool(BaseModel):
    """A tool of another type, most often one that OpenAI's servers run themselves: it is passed over and listed.

    Clients offer such tools whatever the server is.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    type: str
    usable: ClassVar[bool] = False


def by_type(*known: str) -> Discriminator:
    """Chooses the form of a tool, or of a choice among tools: by its type if that is `known`, else `other`."""

    def tag(given: Any) -> str:
        if isinstance(given, str) and "word" in known:
            return "a word"
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        if not isinstance(kind, str):
            kind = known[0]
        return f"a {kind}" if kind in known else "other"

    return Discriminator(tag)


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("a function")] | Annotated[OtherTool, Tag("other")], by_type("function")
]


class NamedChoice(DialectBody):
    """This function is to be called."""

    class ChosenFunction(DialectBody):
        name: ToolName

    type: Literal["function"]
    function: ChosenFunction


class AllowedChoice(DialectBody):
    """Only these of the functions may be called, or one of them is to be."""

    class Allowed(DialectBody):
        mode: Literal["auto", "required"]
        tools: Annotated[
            list[
                Annotated[
                    Annotated[NamedChoice, Tag("a function")] | Annotated[OtherTool, Tag("other")], by_type("function")
                ]
            ],
            Field(min_length=1),
        ]

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedChoice, Tag("a function")]
    | Annotated[AllowedChoice, Tag("a allowed_tools")]
    | Annotated[OtherTool, Tag("other")],
    by_type("function", "allowed_tools", "word"),
]


class TextFormat(DialectBody):
    """The answer is free text."""

    type: Literal["text"]


class JsonObjectFormat(DialectBody):
    """The answer is a JSON object, or JSON that matches a schema, which llama.cpp's server takes here."""

    type: Literal["json_object"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(DialectBody):
    """A schema, under the field name that OpenAI gives it."""

    name: ToolName
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(DialectBody):
    """The answer is JSON that is valid against the schema, which is always enforced.

    Where it is not strict, as it is by default, keywords that cannot be enforced are dropped.
    """

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    # Where llama.cpp's server takes it.
    bare_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def schema_of(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> AnswerSchema | None:
    """What the answer must match. Raises BadRequest where the schema is missing."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema is not None:
        return AnswerSchema(
            wanted.json_schema.json_schema, "response_format.json_schema.schema", wanted.json_schema.strict is True
        )
    bare = wanted.bare_schema if isinstance(wanted, JsonSchemaFormat) else wanted.json_schema
    if bare is not None:
        return AnswerSchema(bare, "response_format.schema", strict=False)
    if isinstance(wanted, JsonSchemaFormat):
        raise BadRequest("response_format.json_schema: it is missing", param="response_format.json_schema")
    return AnswerSchema({"type": "object"}, "response_format")


def tool_of(fields: FunctionFields, where: str, *, strict: bool) -> Tool:
    """A tool as the node has it; without a schema it takes no arguments."""
    schema = fields.parameters or {"type": "object", "properties": {}}
    return Tool(fields.name, fields.description or "", schema, f"{where}.parameters", strict)


def tool_use(
    tools: Sequence[Tool], choice: str | OtherTool | None, names: Sequence[str] | None = None, *, single: bool
) -> ToolUse | None:
    """The tools that the model may call (all, or those of the `names`), and whether it must: `choice` is none, auto or
    required. Raises BadRequest for names of no tool, and where a tool that was passed over is to be called."""
    if isinstance(choice, OtherTool):
        raise BadRequest(
            f"tool_choice: this node has no tools of type {choice.type[:60]!r}; choose a function of the tools",
            param="tool_choice",
        )
    known = {tool.name for tool in tools}
    if len(known) != len(tools):
        raise BadRequest("two tools have the same name", param="tools")
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS} functions are taken, got {len(tools)}", param="tools")
    if choice == "none":
        return None
    for name in names or ():
        if name not in known:
            raise BadRequest(f"tool_choice: there is no tool {name!r} among the tools", param="tool_choice")
    chosen = tuple(tool for tool in tools if names is None or tool.name in names)
    if choice == "required" and not chosen:
        raise BadRequest("tool_choice: required, but there are no tools that can be called here", param="tool_choice")
    return ToolUse(chosen, forced=choice == "required", single=single) if chosen else None
