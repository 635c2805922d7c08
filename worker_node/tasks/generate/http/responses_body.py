"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError

from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.http.body import DialectBody
from worker_node.http.leniency import Table
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.conversation import (
    FunctionFields,
    OtherTool,
    RefusalPart,
    ResponsesImagePart,
    ResponsesTextPart,
    ToolName,
    by_type,
    past_arguments,
    text_and_images,
    tool_of,
    tool_use,
)
from worker_node.tasks.generate.http.fields import EARLIER, RESPONSES, NumberOf, text_or_image
from worker_node.tasks.generate.http.parameters import RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.request import AnswerSchema, GenerationRequest, Message, Tool, ToolCall, ToolUse

MessagePart = Annotated[
    ResponsesTextPart | ResponsesImagePart | RefusalPart, Field(discriminator="type"), BeforeValidator(text_or_image)
]


class MessageItem(DialectBody):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessagePart]
    id: str | None = None
    status: str | None = None


class CallItem(DialectBody):
    """A call that the model made; its arguments are JSON in a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: str | None = None

    def past_arguments(self) -> dict[str, Any]:
        """The arguments as the model wrote them."""
        return past_arguments(self.arguments)


class CustomCallItem(DialectBody):
    """A call that the model made of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: str | None = None

    def past_arguments(self) -> dict[str, Any]:
        """The arguments of the function that the tool is to the model."""
        return {"input": self.input}


class OutputItem(DialectBody):
    """What a called tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[MessagePart]
    id: str | None = None
    status: str | None = None


class ReasoningItem(DialectBody):
    """What the model thought in an earlier turn; it is not shown to the model again."""

    type: Literal["reasoning"]
    content: Any = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None
    summary: Any = None


class SearchItem(BaseModel):
    """What another server searched the web for. It holds no result, so there is nothing to show to the model."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["web_search_call"]


Item = CallItem | CustomCallItem | OutputItem | ReasoningItem | SearchItem | MessageItem
_ITEM_TYPES = frozenset(
    {
        *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("reasoning", "web_search_call"),
    }
)


def _known_item(item: Any) -> Any:
    """The item as it was sent. Raises PydanticCustomError for one of a type that is not read here."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in _ITEM_TYPES:
        reason = "{kind}: items of this type cannot be used here; leave it out, or send its text as a message"
        if kind == "item_reference":
            reason = f"{{kind}}: {EARLIER}"
        raise PydanticCustomError("unsupported_item", reason, {"kind": kind[:60]})
    return item


class ResponsesFunctionTool(FunctionFields):
    """A function that the model may ask to be called."""

    type: Literal["function"]
    name: ToolName
    strict: bool | None = None
    usable: ClassVar[bool] = True


class CustomTool(DialectBody):
    """A tool that takes a text; to the model it is a function of one string."""

    class InputFormat(BaseModel):
        type: str

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None

    @property
    def usable(self) -> bool:
        """Whether its texts are free: a grammar of theirs could not be enforced."""
        return self.format is None or self.format.type == "text"


SingleTool = ResponsesFunctionTool | CustomTool | OtherTool
_SingleTool = (
    Annotated[ResponsesFunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom")]
    | Annotated[OtherTool, Tag("other")]
)


class NamespaceTool(DialectBody):
    """Tools under a common name, which calls of them carry."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    usable: ClassVar[bool] = True
    tools: list[Annotated[_SingleTool, by_type("function", "custom")]]


OfferedTool = Annotated[
    _SingleTool | Annotated[NamespaceTool, Tag("a namespace")], by_type("function", "custom", "namespace")
]


class ResponsesNamedChoice(DialectBody):
    """This tool is to be called; of a namespace, any of its tools."""

    type: Literal["function", "custom", "namespace"]
    name: ToolName
    namespace: str | None = None


NamedOrOther = (
    Annotated[ResponsesNamedChoice, Tag("a function")]
    | Annotated[ResponsesNamedChoice, Tag("a custom")]
    | Annotated[ResponsesNamedChoice, Tag("a namespace")]
    | Annotated[OtherTool, Tag("other")]
)


class ResponsesAllowedChoice(DialectBody):
    """Only these of the tools may be called, or one of them is to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedOrOther, by_type("function", "custom", "namespace")]], Field(min_length=1)]


ResponsesChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[ResponsesAllowedChoice, Tag("a allowed_tools")]
    | NamedOrOther,
    by_type("function", "custom", "namespace", "allowed_tools", "word"),
]


class OfferedCall(NamedTuple):
    """A tool under the name by which the model calls it, and what a call of it is in items."""

    tool: Tool
    name: str
    namespace: str | None
    custom: bool


_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def _model_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a tool. OpenAI's names hold no dot, so those of two tools differ."""
    return name if namespace is None else f"{namespace}.{name}"


class Format(DialectBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(DialectBody):
    """How the answer's text is to be."""

    format: Format | None = None


class ResponsesBody(SamplingBody):
    """Body of POST /v1/responses."""

    rules: ClassVar[Table] = RESPONSES
    takes_images: ClassVar[bool] = True

    model: str
    input: str | Annotated[list[Annotated[Item, BeforeValidator(_known_item)]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: NumberOf | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None

    @property
    def items(self) -> list[Item]:
        """The input; a text is a message of the user."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=[ResponsesTextPart(type="input_text", text=self.input)])]
        return self.input

    def request(self, context: RequestContext) -> GenerationRequest:
        """The domain request that it makes. Raises BadRequest."""
        return GenerationRequest(
            context,
            self._conversation(context),
            parameters.sampling(parameters.OPENAI, vars(self)),
            self.model,
            tool_use=self._tool_use(context),
            grammar=self._schema(),
            split_reasoning=True,
            drop_oldest=self.truncation == "auto",
            sent_as={"prompt": "input", "messages": "input", "max_new_tokens": "max_output_tokens"},
        )

    @cached_property
    def offered(self) -> dict[str, OfferedCall]:
        """The tools that can be offered to the model, by the names by which it calls them. Raises BadRequest."""
        found: dict[str, OfferedCall] = {}
        for tool, where, group in self._flat_tools():
            if isinstance(tool, OtherTool) or not tool.usable:
                continue
            namespace = None if group is None else group.name
            name = _model_name(tool.name, namespace)
            if name in found:
                raise BadRequest(f"tools: two tools have the same name, {name!r}", param="tools")
            if isinstance(tool, CustomTool):
                made = Tool(name, tool.description or "", _TEXT_INPUT, where)
            else:
                made = replace(tool_of(tool, where, strict=tool.strict is True), name=name)
            if group is not None and group.description and tool is group.tools[0]:
                # What a namespace is for is said once, before the first of its tools.
                made = replace(made, description=f"{group.name}: {group.description}\n{made.description}")
            found[name] = OfferedCall(made, tool.name, namespace, isinstance(tool, CustomTool))
        return found

    def _flat_tools(self) -> Iterator[tuple[SingleTool, str, NamespaceTool | None]]:
        """Each tool, its place, and the namespace that it is in."""
        for index, tool in enumerate(self.tools or []):
            if isinstance(tool, NamespaceTool):
                for inner, one in enumerate(tool.tools):
                    yield one, f"tools[{index}].tools[{inner}]", tool
            else:
                yield tool, f"tools[{index}]", None

    def _tool_use(self, context: RequestContext) -> ToolUse | None:
        for tool, _, _ in self._flat_tools():
            if not tool.usable:
                context.note_ignored(f"tools.{tool.type}")
        tools = [offered.tool for offered in self.offered.values()]
        single = self.parallel_tool_calls is False
        match self.tool_choice:
            case ResponsesNamedChoice() as choice:
                return tool_use(tools, "required", self._meant(choice), single=single)
            case ResponsesAllowedChoice(mode=mode, tools=allowed):
                names = [name for one in allowed if not isinstance(one, OtherTool) for name in self._meant(one)]
                return tool_use(tools, mode, names, single=single)
            case mode:
                return tool_use(tools, mode, single=single)

    def _meant(self, choice: ResponsesNamedChoice) -> list[str]:
        """The names, for the model, of the tools that a choice names."""
        if choice.type == "namespace":
            found = [name for name, one in self.offered.items() if one.namespace == choice.name]
            return found or [choice.name]
        return [_model_name(choice.name, choice.namespace)]

    def _conversation(self, context: RequestContext) -> tuple[Message, ...]:
        turns = [Message("system", self.instructions)] if self.instructions else []
        called: dict[str, str] = {}
        for number, item in enumerate(self.items):
            if isinstance(item, CallItem | CustomCallItem):
                name = called[item.call_id] = _model_name(item.name, item.namespace)
                turns.append(Message("assistant", "", (ToolCall(name, item.past_arguments()),)))
            elif isinstance(item, OutputItem):
                text, images = text_and_images(item.output, f"input[{number}].output")
                turns.append(Message("tool", text, tool_name=called.get(item.call_id), images=images))
            elif isinstance(item, SearchItem):
                context.note_ignored(f"input.{item.type}")
            elif isinstance(item, MessageItem):
                text, images = text_and_images(item.content, f"input[{number}].content")
                role = "system" if item.role == "developer" else item.role
                turns.append(Message(role, text, images=images))
        return tuple(turns)

    def _schema(self) -> AnswerSchema | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return AnswerSchema({"type": "object"}, "text.format")
        if wanted.json_schema is None:
            raise BadRequest("text.format.schema: it is missing", param="text.format.schema")
        return AnswerSchema(wanted.json_schema, "text.format.schema", wanted.strict is True)
