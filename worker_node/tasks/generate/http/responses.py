"""OpenAI's /v1/responses: the answer as items, whole or as the events of their growth. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Literal

from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import (
    Finished,
    FinishReason,
    Piece,
    Reasoning,
    Route,
    Token,
    ToolCallArguments,
    ToolCallStarted,
)
from worker_node.http.body import note_ignored, read_body
from worker_node.http.context import busy_fields, request_context
from worker_node.http.errors import describe_error
from worker_node.http.replies import Reply
from worker_node.http.sse import event_frame
from worker_node.http.task import EVENTS, JSON, ApiOperation
from worker_node.tasks.generate.http.conversation import past_arguments
from worker_node.tasks.generate.http.replies import Ask, Renderer, answering
from worker_node.tasks.generate.http.responses_body import OfferedCall, ResponsesBody
from worker_node.tasks.generate.service import ChoiceEvent, Choices

Event = tuple[str, dict[str, Any]]
Json = dict[str, Any]


async def _responses(request: web.Request) -> Ask:
    context = request_context(request)
    body = await read_body(request, ResponsesBody)
    if body.store:
        note_ignored(request, "store")
    return Ask([body.request(context)], partial(_Rendered, body), bool(body.stream))


class _Rendered(Renderer):
    def __init__(self, body: ResponsesBody, choices: Choices) -> None:
        self._response = _Response(body, choices.routes[0])
        self._items = Items(body.offered)
        self._number = 0

    def opening(self) -> bytes:
        begun = self._response.begun()
        return self._frames([(kind, {"response": begun}) for kind in ("response.created", "response.in_progress")])

    def event(self, event: ChoiceEvent) -> bytes:
        if not isinstance(event.event, Finished):
            return self._frames(self._items.add(event.event))
        last = self._items.end(_status(event.event))
        whole = self._response.ended(self._items, event.event)
        return self._frames([*last, (f"response.{whole['status']}", {"response": whole})])

    def failure(self, error: NodeError) -> bytes:
        problem = describe_error(error)
        self._items.end("incomplete")
        failed = self._response.failed(self._items, problem)
        fields = {name: problem[name] for name in ("code", "message", "param")}
        return self._frames([("response.failed", {"response": failed}), ("error", fields)])

    def whole(self, events: Sequence[ChoiceEvent]) -> Json:
        for _, event, _ in events:
            if isinstance(event, Finished):
                self._items.end(_status(event))
                whole = self._response.ended(self._items, event)
            else:
                self._items.add(event)
        return whole

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames = b""
        for kind, fields in events:
            frames += event_frame({"type": kind, "sequence_number": self._number, **fields}, kind)
            self._number += 1
        return frames


def _status(finished: Finished) -> str:
    """How the last item of an answer ended, and so the whole."""
    return "incomplete" if finished.finish_reason is FinishReason.LENGTH else "completed"


class _Response:
    """The object around the items: what was asked for, and how it ended."""

    def __init__(self, body: ResponsesBody, route: Route) -> None:
        self._fields: dict[str, Any] = {
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
            "text": body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text
            else {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools or [] if tool.usable],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
        }

    def begun(self) -> dict[str, Any]:
        """The object before there is an answer."""
        return {**self._fields, "status": "in_progress", "output": [], "usage": None}

    def failed(self, items: Items, error: Mapping[str, Any]) -> dict[str, Any]:
        """The object of an answer that has failed, with the items there are."""
        problem = {"code": error["code"], "message": error["message"]}
        return {**self._fields, "status": "failed", "error": problem, "output": items.output, "usage": None}

    def ended(self, items: Items, finished: Finished) -> dict[str, Any]:
        """The object with the whole answer."""
        status, usage = _status(finished), finished.usage
        return {
            **self._fields,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items.output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **busy_fields(finished.busy),
        }


class Items:
    """Grows by pieces. Only the last item is open. `offered` are the tools that may be called."""

    def __init__(self, offered: Mapping[str, OfferedCall]) -> None:
        self.output: list[dict[str, Any]] = []
        self._offered = offered
        self._arguments = ""
        self._open = False

    def add(self, piece: Piece) -> list[Event]:
        """Add a piece; return the events that report it."""
        if isinstance(piece, ToolCallStarted):
            self._arguments = ""
            return [*self.end(), *self._begin_call(self._offered[piece.name])]
        if isinstance(piece, ToolCallArguments):
            self._arguments += piece.text
            if self._last == "custom_tool_call":
                return []  # its text is certain when the JSON around it is complete
            self.output[-1]["arguments"] = self._arguments
            return [self._event("response.function_call_arguments.delta", delta=piece.text)]
        events: list[Event] = []
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        if not piece.text:
            return events
        if kind == "message" and not piece.text.strip() and self.output and self._last != "message":
            return events  # blanks around a call are no answer
        if not self._open or self._last != kind:
            events += self.end()
            events += self._begin_text(kind)
        part = self.output[-1]["content"][0]
        part["text"] += piece.text
        name = "response.output_text.delta" if isinstance(piece, Token) else "response.reasoning_text.delta"
        return [*events, self._event(name, content_index=0, delta=piece.text, **_no_logprobs(kind))]

    def end(self, status: str = "completed") -> list[Event]:
        """Close the open item, complete or cut."""
        if not self._open:
            return []
        self._open = False
        item = self.output[-1]
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            events.append(
                self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            )
        elif item["type"] == "custom_tool_call":
            item["input"] = str(past_arguments(self._arguments).get("input", ""))
            events.append(self._event("response.custom_tool_call_input.delta", delta=item["input"]))
            events.append(self._event("response.custom_tool_call_input.done", input=item["input"]))
        else:
            part = item["content"][0]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            events.append(
                self._event(f"response.{name}.done", content_index=0, text=part["text"], **_no_logprobs(item["type"]))
            )
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": dict(item)})]

    @property
    def _last(self) -> str:
        return str(self.output[-1]["type"]) if self.output else ""

    def _begin(self, prefix: str, item: dict[str, Any]) -> list[Event]:
        self.output.append({"id": f"{prefix}{token_hex(12)}", "status": "in_progress", **item})
        self._open = True
        added = {"output_index": len(self.output) - 1, "item": dict(self.output[-1])}
        return [("response.output_item.added", added)]

    def _begin_call(self, called: OfferedCall) -> list[Event]:
        kind, prefix, content = "function_call", "fc_", "arguments"
        if called.custom:
            kind, prefix, content = "custom_tool_call", "ctc_", "input"
        group = {} if called.namespace is None else {"namespace": called.namespace}
        item = {"type": kind, "call_id": f"call_{token_hex(12)}", "name": called.name, **group, content: ""}
        return self._begin(prefix, item)

    def _begin_text(self, kind: str) -> list[Event]:
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            events = self._begin("msg_", {"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            events = self._begin("rs_", {"type": "reasoning", "summary": [], "content": []})
        self.output[-1]["content"] = [part]
        return [*events, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}


def _no_logprobs(kind: str) -> dict[str, Any]:
    """A field that the events of an answer's text always have."""
    return {"logprobs": []} if kind == "message" else {}


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
