"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from worker_node.core.errors import BadRequest
from worker_node.core.types import AnswerSchema, Message, RequestContext, ToolCall, ToolUse
from worker_node.http import parameters
from worker_node.http.body import DialectBody
from worker_node.http.leniency import Table
from worker_node.http.parameters import RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.http.conversation import (
    MAX_TOOLS,
    FunctionFields,
    ResponsesImagePart,
    ResponsesTextPart,
    ToolName,
    past_arguments,
    text_and_images,
    text_of,
    tool_of,
    tool_use,
)
from worker_node.tasks.generate.http.fields import (
    RESPONSES,
    NumberOf,
    only_functions,
    only_text,
    text_or_image,
)
from worker_node.tasks.generate.model import GenerationRequest

Parts = list[Annotated[ResponsesTextPart, BeforeValidator(only_text)]]
MessagePart = Annotated[
    ResponsesTextPart | ResponsesImagePart, Field(discriminator="type"), BeforeValidator(text_or_image)
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
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(DialectBody):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
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


Item = CallItem | OutputItem | ReasoningItem | MessageItem


class ResponsesFunctionTool(FunctionFields):
    """A function that the model may ask to be called."""

    type: Literal["function"]
    name: ToolName
    strict: bool | None = None


OfferedTool = Annotated[ResponsesFunctionTool, BeforeValidator(only_functions)]


class ResponsesNamedChoice(DialectBody):
    """This function is to be called."""

    type: Literal["function"]
    name: ToolName


class ResponsesAllowedChoice(DialectBody):
    """Only these of the functions may be called, or one of them is to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedChoice], Field(min_length=1)]


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
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: NumberOf | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedChoice | ResponsesAllowedChoice | None = None
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
            self._conversation(),
            parameters.sampling(parameters.OPENAI, vars(self)),
            self.model,
            tool_use=self._tool_use(),
            grammar=self._schema(),
            split_reasoning=True,
            drop_oldest=self.truncation == "auto",
        )

    def _conversation(self) -> tuple[Message, ...]:
        turns = [Message("system", self.instructions)] if self.instructions else []
        called = {item.call_id: item.name for item in self.items if isinstance(item, CallItem)}
        for number, item in enumerate(self.items):
            if isinstance(item, CallItem):
                turns.append(Message("assistant", "", (ToolCall(item.name, past_arguments(item.arguments)),)))
            elif isinstance(item, OutputItem):
                turns.append(Message("tool", text_of(item.output), tool_name=called.get(item.call_id)))
            elif isinstance(item, MessageItem):
                text, images = text_and_images(item.content, f"input[{number}].content")
                role = "system" if item.role == "developer" else item.role
                turns.append(Message(role, text, images=images))
        return tuple(turns)

    def _tool_use(self) -> ToolUse | None:
        # Here a tool is strict by default.
        tools = [
            tool_of(tool, f"tools[{index}]", strict=tool.strict is not False)
            for index, tool in enumerate(self.tools or [])
        ]
        single = self.parallel_tool_calls is False
        match self.tool_choice:
            case ResponsesNamedChoice(name=name):
                return tool_use(tools, "required", [name], single=single)
            case ResponsesAllowedChoice(mode=mode, tools=allowed):
                return tool_use(tools, mode, [tool.name for tool in allowed], single=single)
            case mode:
                return tool_use(tools, mode, single=single)

    def _schema(self) -> AnswerSchema | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return AnswerSchema({"type": "object"}, "text.format")
        if wanted.json_schema is None:
            raise BadRequest("text.format.schema: it is missing", param="text.format.schema")
        return AnswerSchema(wanted.json_schema, "text.format.schema", wanted.strict is True)
