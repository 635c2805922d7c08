"""OpenAI's /v1/responses: the answer as items, whole or as the events of their growth. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Literal

from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import Route
from worker_node.http.body import note_ignored, read_body
from worker_node.http.context import busy_fields, request_context
from worker_node.http.errors import describe_error
from worker_node.http.replies import Reply
from worker_node.http.sse import event_frame
from worker_node.http.task import EVENTS, JSON, ApiOperation
from worker_node.tasks.generate.answer import Block, BlockKind, Closed, Finished, FinishReason, Grown, Opened
from worker_node.tasks.generate.http.conversation import past_arguments
from worker_node.tasks.generate.http.replies import Ask, Renderer, answering
from worker_node.tasks.generate.http.responses_body import ResponsesBody
from worker_node.tasks.generate.service import ChoiceEvent, Choices

Json = dict[str, Any]


async def _responses(request: web.Request) -> Ask:
    context = request_context(request)
    body = await read_body(request, ResponsesBody)
    if body.store:
        note_ignored(request, "store")
    return Ask([body.request(context)], partial(_Rendered, body), bool(body.stream))


class _Rendered(Renderer):
    """The answer as items: each block is one."""

    def __init__(self, body: ResponsesBody, choices: Choices) -> None:
        self._offered = body.offered
        self._fields = _fields(body, choices.routes[0])
        self._blocks: list[Block] = []
        self._number = 0

    def opening(self) -> bytes:
        begun = {**self._fields, "status": "in_progress", "output": [], "usage": None}
        return b"".join(self._frame(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    def event(self, event: ChoiceEvent) -> bytes:
        match event.event:
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
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
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


def _fields(body: ResponsesBody, route: Route) -> Json:
    """What was asked for, as the object around the items repeats it."""
    return {
        "id": f"resp_{token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": route.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature or 0.0,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
        "tools": [tool.model_dump() for tool in body.tools or [] if tool.usable],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
    }


class OpenAIResponse(Reply):
    """POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


OPERATIONS = (
    ApiOperation(
        "post",
        "/v1/responses",
        answering(_responses),
        "OpenAI: answer",
        {JSON: OpenAIResponse, EVENTS: None},
        ResponsesBody,
        inference=True,
    ),
)
