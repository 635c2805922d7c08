"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import RequestContext, Usage
from worker_node.http.body import DialectBody, Table, Unsupported, note_effects, read_body
from worker_node.http.context import NODE, busy_fields, request_context
from worker_node.http.replies import Reply, anthropic_error, json_response
from worker_node.http.routes import JSON, ApiOperation
from worker_node.http.sse import event_frame
from worker_node.structured_output.form import FormPart
from worker_node.tasks.generate.blocks import Block as AnswerBlock
from worker_node.tasks.generate.blocks import BlockKind, Closed, Event, Finished, FinishReason, Grown, Opened
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.conversation import MAX_TOOLS, OtherTool, except_types, past_arguments, tool_use
from worker_node.tasks.generate.http.parameters import Length, Temperature, TopK, TopP
from worker_node.tasks.generate.http.replies import ParsedRequest, Renderer, generation_route
from worker_node.tasks.generate.images import IMAGE_TYPES, image_of_base64, image_of_url
from worker_node.tasks.generate.prompting import count_prompt, generation_model
from worker_node.tasks.generate.request import GenerationRequest, Image, Message, Rendering, Tool, ToolCall, ToolUse
from worker_node.tasks.generate.service import Choices

# Coding agents begin their instructions with such a line. It differs in every request: no prefix would be cached.
_BILLING = "x-anthropic-billing-header"
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


class TextBlock(DialectBody):
    type: Literal["text"]
    text: str


class ImageBlock(DialectBody):
    """An image, as base64 or as a data URL."""

    class ImageSource(DialectBody):
        type: Literal["base64", "url"]
        media_type: str | None = None
        data: str | None = None
        url: str | None = None

    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(DialectBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(DialectBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class ThinkingBlock(BaseModel):
    """Earlier reasoning; the model is not shown it again."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class AnthropicMessage(DialectBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(DialectBody):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


# A tool that Anthropic runs or defines (web_search_…, bash_…).
AnthropicOwnTool = Annotated[OtherTool, except_types("custom")]


class ToolChoice(DialectBody):
    """Which tool is called: what the model decides, any, the one of that name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(DialectBody):
    """Whether the model thinks before it answers; it thinks as long as it likes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(DialectBody):
    class OutputFormat(DialectBody):
        type: Literal["json_schema"]
        json_schema: Annotated[dict[str, Any], Field(alias="schema")]

    format: OutputFormat | None = None


class CountTokensBody(DialectBody):
    """Body of POST /v1/messages/count_tokens: what becomes the prompt."""

    rules: ClassVar[Table] = {
        "container": Unsupported("this node runs no code"),
        "mcp_servers": Unsupported("this node calls no servers; offer their tools as tools"),
    }
    takes_images: ClassVar[bool] = True

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool | AnthropicOwnTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputConfig.OutputFormat | None = None

    def request(self, context: RequestContext, model: GenerationModel) -> GenerationRequest:
        think = self.thinking is not None and self.thinking.type != "disabled"
        ignored = [f"tools.{tool.type}" for tool in self.tools or [] if isinstance(tool, OtherTool)]
        if think and not model.tokenizer.can_think:
            ignored.append("thinking")
        form, where = self.output_config.format if self.output_config else None, "output_config.format.schema"
        if form is None:
            form, where = self.output_format, "output_format.schema"
        return GenerationRequest(
            context,
            self._conversation(),
            parameters.sampling(vars(self)),
            model.id,
            tool_use=self._tool_use(),
            grammar=None if form is None else FormPart(form.json_schema, where),
            split_reasoning=True,
            # Where the last turn is the assistant's, the answer continues it.
            rendering=Rendering(
                continue_last=self.messages[-1].role == "assistant", think=think and model.tokenizer.can_think
            ),
            ignored=ignored,
        )

    def _conversation(self) -> tuple[Message, ...]:
        system = self.system if isinstance(self.system, str) else _text(self.system or ())
        system = "\n".join(line for line in system.split("\n") if not line.startswith(_BILLING))
        turns = [Message("system", system)] if system.strip() else []
        # The names of called tools by the ids of the calls; those without a result yet.
        called: dict[str, str] = {}
        unanswered: set[str] = set()
        for number, message in enumerate(self.messages):
            where = f"messages[{number}].content"
            content = message.content
            blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            if message.role == "user" and not any(not isinstance(b, TextBlock) or b.text.strip() for b in blocks):
                raise BadRequest.at(where, "a turn of the user must have content that is not empty")
            past: list[ToolCall] = []
            for index, block in enumerate(blocks):
                if isinstance(block, ToolUseBlock):
                    if block.id in called:
                        param = f"{where}[{index}].id"
                        shown = f"{block.id[:100]!r}"
                        raise BadRequest.at(param, f"tool_use ids must be unique, got {shown} twice")
                    called[block.id] = block.name
                    unanswered.add(block.id)
                    past.append(ToolCall(block.name, block.input))
                elif isinstance(block, ToolResultBlock):
                    _check_result(block, called, unanswered, f"{where}[{index}].tool_use_id")
                    unanswered.remove(block.tool_use_id)
                    result, images = _text_and_images(block.content or "", f"{where}[{index}].content")
                    turns.append(Message("tool", result, (), called[block.tool_use_id], images))
            text, images = _text_and_images(blocks, where)
            if text or images or past or message.role == "assistant":
                turns.append(Message(message.role, text, tuple(past), images=images))
        return tuple(turns)

    def _tool_use(self) -> ToolUse | None:
        tools: list[Tool] = []
        for index, tool in enumerate(self.tools or []):
            if isinstance(tool, OtherTool):
                continue
            where = f"tools[{index}].input_schema"
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema, where, tool.strict is True))
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type == "tool" and choice.name is None:
            raise BadRequest.at("tool_choice.name", "it is missing; name the tool to call")
        mode = "required" if choice.type in {"any", "tool"} else choice.type
        names = [choice.name] if choice.type == "tool" and choice.name is not None else None
        return tool_use(tools, mode, names, single=bool(choice.disable_parallel_tool_use))


class MessagesBody(CountTokensBody):
    max_tokens: Length
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


def _check_result(result: ToolResultBlock, called: Mapping[str, str], unanswered: set[str], where: str) -> None:
    """Raise BadRequest for the result of no earlier call, and for a second one."""
    shown = f"{result.tool_use_id[:100]!r}"
    if result.tool_use_id not in called:
        raise BadRequest.at(
            where, f"a tool_result must have its tool_use block in an earlier turn, there is none with id {shown}"
        )
    if result.tool_use_id not in unanswered:
        raise BadRequest.at(where, f"each tool_use has one tool_result, got two for {shown}")


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _text_and_images(content: str | Sequence[Block], where: str) -> tuple[str, tuple[Image, ...]]:
    if isinstance(content, str):
        return content, ()
    images: list[Image] = []
    for index, block in enumerate(content):
        if not isinstance(block, ImageBlock):
            continue
        source, at, place = block.source, len(_text(content[:index])), f"{where}[{index}].source"
        if source.type == "url":
            images.append(image_of_url(source.url or "", at, f"{place}.url"))
            continue
        if source.media_type is not None and source.media_type.lower() not in IMAGE_TYPES:
            kinds = ", ".join(sorted(IMAGE_TYPES))
            raise BadRequest.at(f"{place}.media_type", f"must be one of {kinds}")
        images.append(image_of_base64(source.data or "", at, f"{place}.data"))
    return _text(content), tuple(images)


async def _messages(request: web.Request, context: RequestContext, body: MessagesBody) -> ParsedRequest:
    model = await generation_model(request.app[NODE].manager, body.model, context.deadline)
    return ParsedRequest([body.request(context, model)], _Rendered, bool(body.stream))


async def _count_tokens(request: web.Request) -> web.Response:
    context = request_context(request)
    body = await read_body(request, CountTokensBody)
    model = await generation_model(request.app[NODE].manager, body.model, context.deadline)
    wanted = body.request(context, model)
    note_effects(request, wanted.ignored)
    return json_response({"input_tokens": await count_prompt(request.app[NODE].services, model, wanted)})


class _Rendered(Renderer):
    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._fields: dict[str, Any] = {
            "id": f"msg_{token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": choices.model,
        }

    def opening(self) -> bytes:
        # A stream's beginning knows nothing of the cache yet.
        usage = _usage(Usage(self._choices.runs[0].execution.route.token_count, 0))
        message = self._fields | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _frame("message_start", message=message) + _frame("ping")

    def event(self, event: Event, *_: int) -> bytes:
        match event:
            case Opened(block):
                return _frame("content_block_start", index=block.index, content_block=_content(block, ""))
            case Grown(block, text):
                kind, name = _DELTAS[block.kind]
                return _frame("content_block_delta", index=block.index, delta={"type": kind, name: text})
            case Closed(block):
                return _frame("content_block_stop", index=block.index)
            case finished:
                ending, busy = _ending(finished), busy_fields(finished.busy)
                last = _frame("message_delta", delta=ending, usage=_usage(finished.usage), **busy)
                return last + _frame("message_stop")

    def failure(self, error: NodeError) -> bytes:
        return event_frame(anthropic_error(error), "error")

    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        [finished] = ends
        calls = finished.calls
        content = [_content(one, one.text) for one in finished.blocks if one.kind is not BlockKind.CALL or one in calls]
        return self._fields | {"content": content, "usage": _usage(finished.usage)} | _ending(finished)


# The type of a block's growth, and the field that holds it.
_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _content(block: AnswerBlock, text: str) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": past_arguments(text)}


def _frame(kind: str, **fields: Any) -> bytes:
    return event_frame({"type": kind, **fields}, kind)


def _ending(finished: Finished) -> dict[str, str | None]:
    natural = "end_turn" if finished.stop_sequence is None else "stop_sequence"
    reason = _STOP_REASONS.get(finished.finish_reason, natural)
    return {"stop_reason": reason, "stop_sequence": finished.stop_sequence if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens that were read from the cache apart."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


class AnthropicAnswer(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class AnthropicCount(Reply):
    input_tokens: int


OPERATIONS = (
    generation_route("/v1/messages", _messages, "Anthropic: answer a conversation", AnthropicAnswer, MessagesBody),
    ApiOperation(
        "post",
        "/v1/messages/count_tokens",
        _count_tokens,
        "Anthropic: tokens of a prompt",
        {JSON: AnthropicCount},
        CountTokensBody,
    ),
)
