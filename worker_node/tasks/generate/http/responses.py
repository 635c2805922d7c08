"""OpenAI's POST /v1/responses: the answer as items. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import DialectBody, Table, Unsupported
from worker_node.http.context import busy_fields
from worker_node.http.replies import Reply, describe_error
from worker_node.http.sse import event_frame
from worker_node.tasks.generate.blocks import Block, BlockKind, Closed, Event, Finished, FinishReason, Grown, Opened
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.conversation import (
    TEXT_OR_IMAGE,
    AnswerFormat,
    FunctionFields,
    ImagePart,
    Mode,
    OtherTool,
    RefusalPart,
    TextPart,
    ToolName,
    except_types,
    past_arguments,
    text_and_images,
    tool_of,
    tool_use,
)
from worker_node.tasks.generate.http.parameters import SAMPLING, Length, RepetitionPenalty, SamplingBody
from worker_node.tasks.generate.http.replies import ParsedRequest, Renderer, generation_route
from worker_node.tasks.generate.request import GenerationRequest, Message, Tool, ToolCall, ToolUse
from worker_node.tasks.generate.service import Choices

Json = dict[str, Any]

_NOT_STORED = "nothing is stored here; send the conversation so far in `input`"

MessagePart = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type"), TEXT_OR_IMAGE]


class InputItem(DialectBody):
    """A part of the input. Clients send items of earlier answers back as they came."""

    id: str | None = None
    status: str | None = None


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessagePart]


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(InputItem):
    """A call that the model made of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputItem(InputItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[MessagePart]


class PassedItem(BaseModel):
    """Earlier reasoning, which the model is not shown again, or a search, which holds no result."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["reasoning", "web_search_call"]


Item = CallItem | CustomCallItem | OutputItem | PassedItem | MessageItem
_ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "web_search_call",
)


def _known_item(item: Any) -> Any:
    """The item as it was sent. Raises PydanticCustomError for one of a type that is not read here."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in _ITEM_TYPES:
        reason = "{kind}: items of this type cannot be used here; leave it out, or send its text as a message"
        if kind == "item_reference":
            reason = f"{{kind}}: {_NOT_STORED}"
        raise PydanticCustomError("unsupported_item", reason, {"kind": kind[:60]})
    return item


class ResponsesFunctionTool(FunctionFields):
    type: Literal["function"]
    name: ToolName


class CustomTool(DialectBody):
    """A tool that takes a text; to the model it is a function of one string."""

    class InputFormat(BaseModel):
        type: str

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


def _without_grammar(tool: CustomTool) -> CustomTool | OtherTool:
    """Pass over a tool that wants texts of a grammar, which could not be enforced."""
    return tool if tool.format is None or tool.format.type == "text" else OtherTool(type=tool.type)


_FreeTextTool = Annotated[CustomTool, AfterValidator(_without_grammar)]
SingleTool = ResponsesFunctionTool | CustomTool | OtherTool


class NamespaceTool(DialectBody):
    """Tools under a common name, which calls of them carry."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[ResponsesFunctionTool | _FreeTextTool | Annotated[OtherTool, except_types("function", "custom")]]


_Other = Annotated[OtherTool, except_types("function", "custom", "namespace")]


class ResponsesNamedChoice(DialectBody):
    """This tool is to be called; of a namespace, any of its tools."""

    type: Literal["function", "custom", "namespace"]
    name: ToolName
    namespace: str | None = None


class ResponsesAllowedChoice(DialectBody):
    """Only these of the tools may be called, or one of them is to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedChoice | _Other], Field(min_length=1)]


_OtherChoice = Annotated[OtherTool, except_types("function", "custom", "namespace", "allowed_tools")]


class OfferedCall(NamedTuple):
    """A tool under the model's name for it, and what a call of it is in items."""

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
    """The model's name for a tool. OpenAI's names hold no dot, so no two tools share one."""
    return name if namespace is None else f"{namespace}.{name}"


class TextOptions(DialectBody):
    format: AnswerFormat | None = None


class ResponsesBody(SamplingBody):
    rules: ClassVar[Table] = {
        **SAMPLING,
        "background": Unsupported("a response is made while the client waits"),
        "conversation": Unsupported(_NOT_STORED),
        "previous_response_id": Unsupported(_NOT_STORED),
        "prompt": Unsupported("no prompts are stored here"),
        "top_logprobs": Unsupported("use /v1/chat/completions"),
        "use_beam_search": Unsupported("use /v1/chat/completions"),
    }
    takes_images: ClassVar[bool] = True

    model: str
    input: str | Annotated[list[Annotated[Item, BeforeValidator(_known_item)]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponsesFunctionTool | _FreeTextTool | NamespaceTool | _Other] | None = None
    tool_choice: Mode | ResponsesNamedChoice | ResponsesAllowedChoice | _OtherChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None

    def request(self, context: RequestContext) -> GenerationRequest:
        form = self.text.format if self.text else None
        return GenerationRequest(
            context,
            self._conversation(),
            parameters.sampling(vars(self)),
            self.model,
            tool_use=self._tool_use(),
            grammar=form.schema_of_answer("text.format", "schema") if form else None,
            split_reasoning=True,
            drop_oldest=self.truncation == "auto",
            sent_as={"prompt": "input", "messages": "input", "max_new_tokens": "max_output_tokens"},
            ignored=self._ignored(),
        )

    def _placed_tools(self) -> Iterator[tuple[str, NamespaceTool | None, SingleTool]]:
        """The tools with their places in the request and their namespaces."""
        for index, one in enumerate(self.tools or []):
            if isinstance(one, NamespaceTool):
                yield from ((f"tools[{index}].tools[{inner}]", one, tool) for inner, tool in enumerate(one.tools))
            else:
                yield f"tools[{index}]", None, one

    def _ignored(self) -> list[str]:
        places = ["store"] if self.store else []
        places += [f"tools.{tool.type}" for _, _, tool in self._placed_tools() if isinstance(tool, OtherTool)]
        if any(isinstance(item, PassedItem) and item.type == "web_search_call" for item in self.input):
            places.append("input.web_search_call")
        return places

    @cached_property
    def offered(self) -> dict[str, OfferedCall]:
        """The tools that can be called here, by the model's names for them. Raises BadRequest."""
        found: dict[str, OfferedCall] = {}
        for where, group, tool in self._placed_tools():
            if isinstance(tool, OtherTool):
                continue
            namespace = None if group is None else group.name
            name = _model_name(tool.name, namespace)
            if name in found:
                raise BadRequest.at("tools", f"two tools have the same name, {name!r}")
            if isinstance(tool, CustomTool):
                made = Tool(name, tool.description or "", _TEXT_INPUT, where)
            else:
                made = replace(tool_of(tool, where), name=name)
            if group is not None and group.description and tool is group.tools[0]:
                # What a namespace is for is said once, before the first of its tools.
                made = replace(made, description=f"{group.name}: {group.description}\n{made.description}")
            found[name] = OfferedCall(made, tool.name, namespace, isinstance(tool, CustomTool))
        return found

    def _tool_use(self) -> ToolUse | None:
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

    def _conversation(self) -> tuple[Message, ...]:
        turns = [Message("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return (*turns, Message("user", self.input))
        called: dict[str, str] = {}
        for number, item in enumerate(self.input):
            match item:
                case CallItem() | CustomCallItem():
                    name = called[item.call_id] = _model_name(item.name, item.namespace)
                    arguments = past_arguments(item.arguments) if isinstance(item, CallItem) else {"input": item.input}
                    turns.append(Message("assistant", "", (ToolCall(name, arguments),)))
                case OutputItem():
                    text, images = text_and_images(item.output, f"input[{number}].output")
                    turns.append(Message("tool", text, tool_name=called.get(item.call_id), images=images))
                case MessageItem():
                    text, images = text_and_images(item.content, f"input[{number}].content")
                    role = "system" if item.role == "developer" else item.role
                    turns.append(Message(role, text, images=images))
        return tuple(turns)


async def _responses(_: web.Request, context: RequestContext, body: ResponsesBody) -> ParsedRequest:
    return ParsedRequest([body.request(context)], partial(_Rendered, body), bool(body.stream))


class _Rendered(Renderer):
    """The answer as items: each block is one."""

    def __init__(self, body: ResponsesBody, choices: Choices) -> None:
        self._offered = body.offered
        # What was asked for is repeated around the items.
        self._fields = {
            "id": f"resp_{token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": choices.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature or 0.0,
            "text": body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text
            else {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools or [] if not isinstance(tool, OtherTool)],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
        }
        self._blocks: list[Block] = []
        self._number = 0

    def opening(self) -> bytes:
        begun = {**self._fields, "status": "in_progress", "output": [], "usage": None}
        return b"".join(self._frame(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    def event(self, event: Event, *_: int) -> bytes:
        match event:
            case Opened(block):
                self._blocks.append(block)
                return self._opened(block)
            case Grown(block, text):
                if self._custom(block):
                    return b""  # its text is certain when the JSON around it is complete
                return self._of_item(f"response.{_NAMES[block.kind]}.delta", block, delta=text)
            case Closed(block):
                return self._closed(block)
            case finished:
                whole = self.whole([finished])
                return self._frame(f"response.{whole['status']}", response=whole)

    def failure(self, error: NodeError) -> bytes:
        problem = describe_error(error)
        failed = {
            **self._fields,
            "status": "failed",
            "error": {name: problem[name] for name in ("code", "message")},
            "output": [self._item(block, block.text) for block in self._blocks],
            "usage": None,
        }
        fields = {name: problem[name] for name in ("code", "message", "param")}
        return self._frame("response.failed", response=failed) + self._frame("error", **fields)

    def whole(self, ends: Sequence[Finished]) -> Json:
        [finished] = ends
        cut, usage = finished.finish_reason is FinishReason.LENGTH, finished.usage
        return {
            **self._fields,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, block.text) for block in finished.blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **busy_fields(finished.busy),
        }

    def _opened(self, block: Block) -> bytes:
        item = {**self._item(block, ""), "status": "in_progress"}
        if block.kind is BlockKind.CALL:
            return self._frame("response.output_item.added", output_index=block.index, item=item)
        [part], item["content"] = item["content"], []
        added = self._frame("response.output_item.added", output_index=block.index, item=item)
        return added + self._of_item("response.content_part.added", block, part=part)

    def _closed(self, block: Block) -> bytes:
        item, name = self._item(block, block.text), f"response.{_NAMES[block.kind]}"
        if self._custom(block):
            name, value = "response.custom_tool_call_input", item["input"]
            frames = self._of_item(f"{name}.delta", block, delta=value) + self._of_item(
                f"{name}.done", block, input=value
            )
        elif block.kind is BlockKind.CALL:
            frames = self._of_item(f"{name}.done", block, arguments=item["arguments"], name=item["name"])
        else:
            [part] = item["content"]
            frames = self._of_item(f"{name}.done", block, text=part["text"])
            frames += self._of_item("response.content_part.done", block, part=part)
        return frames + self._frame("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, text: str) -> Json:
        status = "incomplete" if block.open or block.cut else "completed"
        match block.kind:
            case BlockKind.TEXT:
                part: Json = {"type": "output_text", "text": text, "annotations": []}
                item: Json = {"type": "message", "role": "assistant", "content": [part]}
            case BlockKind.REASONING:
                part = {"type": "reasoning_text", "text": text}
                item = {"type": "reasoning", "summary": [], "content": [part]}
            case BlockKind.CALL:
                item = self._call(block, text)
        return {"id": self._id(block), "status": status, **item}

    def _call(self, block: Block, text: str) -> Json:
        called = self._offered[block.name]
        item = {"call_id": f"call_{block.id}", "name": called.name}
        if called.namespace is not None:
            item["namespace"] = called.namespace
        if called.custom:
            return {"type": "custom_tool_call", **item, "input": str(past_arguments(text).get("input", ""))}
        return {"type": "function_call", **item, "arguments": text}

    def _id(self, block: Block) -> str:
        return ("ctc_" if self._custom(block) else _PREFIXES[block.kind]) + block.id

    def _custom(self, block: Block) -> bool:
        return block.kind is BlockKind.CALL and self._offered[block.name].custom

    def _of_item(self, kind: str, block: Block, **fields: Any) -> bytes:
        """An event within the item of a block."""
        if block.kind is not BlockKind.CALL:
            fields = {"content_index": 0, **fields}
            if block.kind is BlockKind.TEXT and "part" not in fields:
                fields["logprobs"] = []
        return self._frame(kind, item_id=self._id(block), output_index=block.index, **fields)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        frame = event_frame({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return frame


_NAMES = {
    BlockKind.TEXT: "output_text",
    BlockKind.REASONING: "reasoning_text",
    BlockKind.CALL: "function_call_arguments",
}
_PREFIXES = {BlockKind.TEXT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}


class OpenAIResponse(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


OPERATIONS = (generation_route("/v1/responses", _responses, "OpenAI: answer", OpenAIResponse, ResponsesBody),)
