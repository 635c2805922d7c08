"""The messages of a conversation as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from worker_node.core.errors import BadRequest
from worker_node.http.body import MAX_NESTING, DialectBody, Table, Unsupported, nested_deeper
from worker_node.structured_output.form import FormPart
from worker_node.tasks.generate.images import image_of_url
from worker_node.tasks.generate.request import Image, Message, Rendering, Tool, ToolCall, ToolUse

MAX_TOOLS = 128
NO_TEMPLATE = "the model's own template cannot be replaced; send a finished prompt to /v1/completions"

# Content that OpenAI's API has and this node does not.
_MEDIA = {
    "input_audio": "sound is not supported; the models here read text and images",
    "audio_url": "sound is not supported; the models here read text and images",
    "video_url": "films are not supported; the models here read text and images",
    "input_video": "films are not supported; the models here read text and images",
    "file": "files are not supported; the models here read text and images",
    "input_file": "files are not supported; the models here read text and images",
}
_IMAGES = dict.fromkeys(("image_url", "input_image"), "images are read in messages of the user only")


def refuse_types(reasons: Mapping[str, str]) -> BeforeValidator:

    def check(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in reasons:
            raise PydanticCustomError("unsupported", "{kind}: {reason}", {"kind": kind, "reason": reasons[kind]})
        return part

    return BeforeValidator(check)


TEXT_OR_IMAGE = refuse_types(_MEDIA)
ONLY_TEXT = refuse_types(_MEDIA | _IMAGES)


class TextPart(DialectBody):
    """Text, of chat or of the Responses API."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImagePart(DialectBody):
    """An image. `detail` is a hint for models that see in several resolutions."""

    class Url(DialectBody):
        url: str
        detail: str | None = None

    type: Literal["image_url", "input_image"]
    # The Responses API, some clients, and OpenAI's own older examples write the URL alone.
    image_url: Annotated[Url, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]
    detail: str | None = None


class RefusalPart(DialectBody):
    """Text of an earlier answer in which a model declined."""

    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[TextPart, ONLY_TEXT]]
Part = Annotated[TextPart | ImagePart, Field(discriminator="type"), TEXT_OR_IMAGE]


class ChatMessage(DialectBody):
    rules: ClassVar[Table] = {
        "audio": Unsupported("audio is not supported"),
        "function_call": Unsupported("this is the form before 2023-11; use tool_calls"),
    }


class SystemMessage(ChatMessage):
    """Instructions; `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(ChatMessage):
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


class AssistantMessage(ChatMessage):
    role: Literal["assistant"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type"), ONLY_TEXT]] | None = None
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    reasoning_content: str | None = None


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Turn = SystemMessage | UserMessage | AssistantMessage | ToolMessage


def conversation(messages: Sequence[Turn]) -> tuple[Message, ...]:
    """The messages as the node has them. Raises BadRequest, PayloadTooLarge for an image."""
    called: dict[str, str] = {}
    turns: list[Message] = []
    for number, message in enumerate(messages):
        text, images = text_and_images(message.content, f"messages[{number}].content")
        match message:
            case UserMessage():
                turns.append(Message("user", text, images=images))
            case AssistantMessage():
                calls = [call.function for call in message.tool_calls or []]
                called |= {call.id: call.function.name for call in message.tool_calls or []}
                past = tuple(ToolCall(call.name, past_arguments(call.arguments)) for call in calls)
                turns.append(Message("assistant", text, past))
            case ToolMessage():
                turns.append(Message("tool", text, tool_name=message.name or called.get(message.tool_call_id)))
            case SystemMessage():
                turns.append(Message("system", text))
    return tuple(turns)


def text_and_images(
    content: str | Sequence[TextPart | ImagePart | RefusalPart] | None, where: str
) -> tuple[str, tuple[Image, ...]]:
    """The text of a content, and the images in it. Raises BadRequest, PayloadTooLarge."""
    if content is None or isinstance(content, str):
        return content or "", ()
    text, images = "", []
    for number, part in enumerate(content):
        match part:
            case ImagePart():
                field = "image_url.url" if part.type == "image_url" else "image_url"
                images.append(image_of_url(part.image_url.url, len(text), f"{where}[{number}].{field}"))
            case RefusalPart():
                text += part.refusal
            case TextPart():
                text += part.text
    return text, tuple(images)


def past_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of an earlier call. They may be cut off or malformed: then the template shows the text."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    usable = isinstance(arguments, dict) and not nested_deeper(arguments, MAX_NESTING)
    return arguments if usable else {"INVALID_JSON": text}


# Tools, the choice among them, and the form of the answer, as OpenAI's bodies write them.

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionFields(DialectBody):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(DialectBody):
    class OfferedFunction(FunctionFields):
        name: ToolName

    type: Literal["function"]
    function: OfferedFunction


class OtherTool(BaseModel):
    """A tool that another server runs itself. Clients offer such tools to any server: it is ignored and listed."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: str


def except_types(*known: str) -> AfterValidator:
    """For `OtherTool`: refuses types that have models of their own, which report what is wrong."""

    def check(tool: OtherTool) -> OtherTool:
        if tool.type in known:
            raise PydanticCustomError("known_type", "Input should be of another type")
        return tool

    return AfterValidator(check)


OtherThanFunction = Annotated[OtherTool, except_types("function")]


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
        tools: Annotated[list[NamedChoice | OtherThanFunction], Field(min_length=1)]

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Mode = Literal["none", "auto", "required"]
OtherChoice = Annotated[OtherTool, except_types("function", "allowed_tools")]


class AnswerFormat(DialectBody):
    """The form of the answer. Where a schema is not strict, keywords that cannot be enforced are dropped.

    Chat has the schema in `json_schema`, the Responses API and llama.cpp beside the type.
    """

    class JsonSchema(DialectBody):
        name: ToolName
        description: str | None = None
        json_schema: Annotated[dict[str, Any], Field(alias="schema")]
        strict: bool | None = None

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    bare_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def schema_of_answer(self, where: str, needed: str) -> FormPart | None:
        """Return the schema of a format at `where`. Raises BadRequest where the `needed` field is missing."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            given, place = self.json_schema, f"{where}.json_schema.schema"
            return FormPart(given.json_schema, place, given.strict is True)
        if self.bare_schema is not None:
            return FormPart(self.bare_schema, f"{where}.schema", self.strict is True)
        if self.type == "json_schema":
            raise BadRequest.at(f"{where}.{needed}", "it is missing")
        return FormPart({"type": "object"}, where)


def tool_of(fields: FunctionFields, where: str) -> Tool:
    """A tool as the node has it; without a schema it takes no arguments."""
    schema = fields.parameters or {"type": "object", "properties": {}}
    return Tool(fields.name, fields.description or "", schema, f"{where}.parameters", fields.strict is True)


def tool_use(
    tools: Sequence[Tool], choice: str | OtherTool | None, names: Sequence[str] | None = None, *, single: bool
) -> ToolUse | None:
    """The tools that may be called: all, or those of the `names`. `choice` is none, auto (or None), or required.

    Raises BadRequest for names of no tool, and for the choice of a tool that was ignored.
    """
    if isinstance(choice, OtherTool):
        raise BadRequest.at(
            "tool_choice", f"this node has no tools of type {choice.type[:60]!r}; choose a function of the tools"
        )
    known = {tool.name for tool in tools}
    if len(known) != len(tools):
        raise BadRequest("two tools have the same name", param="tools")
    if len(tools) > MAX_TOOLS:
        raise BadRequest.at("tools", f"at most {MAX_TOOLS} functions are taken, got {len(tools)}")
    if choice == "none":
        return None
    for name in names or ():
        if name not in known:
            raise BadRequest.at("tool_choice", f"there is no tool {name!r} among the tools")
    chosen = tuple(tool for tool in tools if names is None or tool.name in names)
    if choice == "required" and not chosen:
        raise BadRequest.at("tool_choice", "required, but there are no tools that can be called here")
    return ToolUse(chosen, forced=choice == "required", single=single) if chosen else None


# vLLM's parameters of the chat template.

_MAX_BYTES = 8192
_MAX_NESTING = 5
# What the node itself hands to the template.
_RESERVED = frozenset({"add_generation_prompt", "bos_token", "chat_template", "eos_token", "messages", "tools"})


class RenderingBody(DialectBody):
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def rendering(self) -> Rendering:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest.at(
                "continue_final_message",
                "the prompt ends either with the last message or where a new one begins; leave "
                "add_generation_prompt out",
            )
        variables = self.chat_template_kwargs or {}
        if taken := sorted(_RESERVED & variables.keys()):
            raise BadRequest.at("chat_template_kwargs", f"{taken[0]} is set by the node")
        if variables and (nested_deeper(variables, _MAX_NESTING) or len(orjson.dumps(variables)) > _MAX_BYTES):
            raise BadRequest.at(
                "chat_template_kwargs", f"at most {_MAX_BYTES} bytes of JSON, nested at most {_MAX_NESTING} levels deep"
            )
        return Rendering(
            variables,
            answer_prompt=self.add_generation_prompt is not False,
            continue_last=bool(self.continue_final_message),
        )
