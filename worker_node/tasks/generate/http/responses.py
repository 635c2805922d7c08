"""OpenAI's /v1/responses: the answer as items, whole or as the events of their growth; stored for later turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import TypeAdapter

from worker_node.core.errors import BadRequest, NodeError, ResponseNotFound, UnsupportedParameter
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
from worker_node.http.access import API_KEYS
from worker_node.http.body import note_ignored, read_body
from worker_node.http.context import busy_fields, request_context
from worker_node.http.errors import describe_error
from worker_node.http.replies import Reply, json_response
from worker_node.http.sse import event_frame
from worker_node.http.task import EVENTS, JSON, ApiOperation
from worker_node.tasks.generate.http.replies import Ask, Renderer, answering
from worker_node.tasks.generate.http.response_store import ResponseStore, StoredItem, StoredResponse
from worker_node.tasks.generate.http.responses_body import CallItem, InputItem, Item, ItemReference, ResponsesBody
from worker_node.tasks.generate.service import ChoiceEvent, Choices

Event = tuple[str, dict[str, Any]]
Json = dict[str, Any]
RESPONSES = web.AppKey("responses", ResponseStore)
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_PAGE = 20
_LARGEST_PAGE = 100
_one_item: TypeAdapter[Item] = TypeAdapter(Item)


async def _responses(request: web.Request) -> Ask:
    context = request_context(request)
    body = await read_body(request, ResponsesBody)
    conversation = Conversation(request, body)
    wanted = body.request(context, conversation.items)
    return Ask([wanted], partial(_Rendered, body, conversation), bool(body.stream))


class _Rendered(Renderer):
    """How a response ended is stored before the client hears of it, who may refer to it at once."""

    def __init__(self, body: ResponsesBody, conversation: Conversation, choices: Choices) -> None:
        self._response = _Response(body, choices.routes[0], stored=conversation.stored)
        self._conversation = conversation
        self._items = Items()
        self._number = 0
        self._ended = False

    def opening(self) -> bytes:
        begun = self._response.begun()
        self._conversation.begin(begun)
        return self._frames([(kind, {"response": begun}) for kind in ("response.created", "response.in_progress")])

    def event(self, event: ChoiceEvent) -> bytes:
        if not isinstance(event.event, Finished):
            return self._frames(self._items.add(event.event))
        last = self._items.end(_status(event.event))
        whole = self._end(self._response.ended(self._items, event.event))
        return self._frames([*last, (f"response.{whole['status']}", {"response": whole})])

    def failure(self, error: NodeError) -> bytes:
        problem = describe_error(error)
        self._items.end("incomplete")
        failed = self._end(self._response.stopped(self._items, "failed", problem))
        fields = {name: problem[name] for name in ("code", "message", "param")}
        return self._frames([("response.failed", {"response": failed}), ("error", fields)])

    def whole(self, events: Sequence[ChoiceEvent]) -> Json:
        for _, event, _ in events:
            if isinstance(event, Finished):
                self._items.end(_status(event))
                whole = self._response.ended(self._items, event)
            else:
                self._items.add(event)
        self._conversation.begin(whole)
        return whole

    def abandon(self) -> None:
        if not self._ended:
            self._items.end("incomplete")
            self._end(self._response.stopped(self._items, "cancelled"))

    def _end(self, whole: Json) -> Json:
        self._ended = True
        self._conversation.end(whole)
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

    def __init__(self, body: ResponsesBody, route: Route, *, stored: bool) -> None:
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
            "previous_response_id": body.previous_response_id,
            "store": stored,
            "temperature": body.temperature or 0.0,
            "text": body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text
            else {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
        }

    def begun(self) -> dict[str, Any]:
        """The object before there is an answer."""
        return {**self._fields, "status": "in_progress", "output": [], "usage": None}

    def stopped(self, items: Items, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object of an answer that was `cancelled` or has `failed`, with the items there are."""
        problem = None if error is None else {"code": error["code"], "message": error["message"]}
        return {**self._fields, "status": status, "error": problem, "output": items.output, "usage": None}

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
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **busy_fields(finished.busy),
        }


class Items:
    """Grows by pieces. Only the last item is open."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open = False

    def add(self, piece: Piece) -> list[Event]:
        """Add a piece; return the events that report it."""
        if isinstance(piece, ToolCallStarted):
            item = {"type": "function_call", "call_id": f"call_{token_hex(12)}", "name": piece.name, "arguments": ""}
            return [*self.end(), *self._begin("fc_", item)]
        if isinstance(piece, ToolCallArguments):
            self.output[-1]["arguments"] += piece.text
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


# Stored responses: read one, its input, delete it; and what a request refers to of earlier ones.


class Conversation:
    """The input of a request, with what it refers to: an earlier response by id, earlier items by id.

    Raises ResponseNotFound for a reference to what is not stored for the request's key.
    """

    def __init__(self, request: web.Request, body: ResponsesBody) -> None:
        self._store = request.app[RESPONSES]
        self._owner = request.app[API_KEYS].owner(request)
        self.stored = self._store.enabled and body.store is not False
        if body.store and not self.stored:
            note_ignored(request, "store")
        earlier = self._earlier(body.previous_response_id)
        # Calls that were cut off have unreadable arguments and no result.
        self.items: list[Item] = [
            item for item in map(_item, earlier) if not (isinstance(item, CallItem) and item.status == "incomplete")
        ]
        references = [item.id for item in body.items if isinstance(item, ItemReference)]
        found = self._store.items(self._owner, references)
        own: list[StoredItem] = []
        for index, item in enumerate(body.items):
            if isinstance(item, ItemReference):
                if item.id not in found:
                    raise _missing(self._store, "item", item.id, f"input[{index}]")
                own.append(found[item.id])
                self.items.append(_item(found[item.id]))
            else:
                own.append(_stored_item(item))
                self.items.append(item)
        self._input = (*earlier, *own)

    def begin(self, response: Json) -> None:
        """Store a response."""
        if self.stored:
            output = tuple(StoredItem(item["id"], orjson.dumps(item)) for item in response["output"])
            stored = StoredResponse(response["id"], response["status"], orjson.dumps(response), self._input, output)
            self._store.put(self._owner, stored)

    def end(self, response: Json) -> None:
        """Store how a response ended that is stored already, unless it has been deleted meanwhile."""
        if self._store.get(self._owner, response["id"]) is not None:
            self.begin(response)

    def _earlier(self, response_id: str | None) -> tuple[StoredItem, ...]:
        if response_id is None:
            return ()
        found = self._store.get(self._owner, response_id)
        if found is None:
            raise _missing(self._store, "response", response_id, "previous_response_id")
        if found.status == "in_progress":
            raise BadRequest(
                f"previous_response_id: {response_id[:100]} is still being made; wait for its end",
                param="previous_response_id",
            )
        return found.items


def _item(stored: StoredItem) -> Item:
    return _one_item.validate_python(orjson.loads(stored.data))


def _stored_item(item: InputItem) -> StoredItem:
    plain: Json = item.model_dump(exclude_none=True)
    full = {"id": f"{_PREFIXES[item.type]}{token_hex(12)}", "type": item.type, "status": "completed"} | plain
    return StoredItem(full["id"], orjson.dumps(full))


def _missing(store: ResponseStore, kind: str, given: str, param: str | None = None) -> ResponseNotFound:
    why = (
        f"it was not stored, has been deleted, belongs to another key, or is gone after {store.limits.seconds:g} s or "
        "for want of room; send the earlier turns as input"
        if store.enabled
        else "this node stores none (stored_responses = 0); send the earlier turns as input"
    )
    where = f"{param}: " if param else ""
    return ResponseNotFound(f"{where}there is no {kind} {given[:100]!r} here: {why}", param=param)


def _found(request: web.Request) -> StoredResponse:
    store, response_id = request.app[RESPONSES], request.match_info["id"]
    found = store.get(request.app[API_KEYS].owner(request), response_id)
    if found is None:
        raise _missing(store, "response", response_id)
    return found


async def _get(request: web.Request) -> web.Response:
    found = _found(request)
    if request.query.get("stream", "false").lower() not in ("false", "0"):
        raise UnsupportedParameter("stream: a stored response is given whole; leave it out", param="stream")
    return web.Response(body=found.response, content_type="application/json", charset="utf-8")


async def _delete(request: web.Request) -> web.Response:
    found = _found(request)
    request.app[RESPONSES].delete(request.app[API_KEYS].owner(request), found.id)
    return json_response({"id": found.id, "object": "response", "deleted": True})


async def _cancel(request: web.Request) -> web.Response:
    found = _found(request)
    raise BadRequest(f"{found.id} was not made in the background; to cancel a response, close its connection")


async def _input_items(request: web.Request) -> web.Response:
    items = _found(request).input
    order, limit = request.query.get("order", "desc"), request.query.get("limit", str(_PAGE))
    if order not in ("asc", "desc"):
        raise BadRequest("order: must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _LARGEST_PAGE):
        raise BadRequest(f"limit: must be a number from 1 to {_LARGEST_PAGE}", param="limit")
    items = items if order == "asc" else items[::-1]
    if (after := request.query.get("after")) is not None:
        items = items[_index(items, after) + 1 :]
    page = items[: int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    data = [orjson.loads(item.data) for item in page]
    return json_response(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(page) < len(items)}
    )


def _index(items: Sequence[StoredItem], item_id: str) -> int:
    for index, item in enumerate(items):
        if item.id == item_id:
            return index
    raise BadRequest(f"after: there is no item {item_id[:100]!r} in this input", param="after")


class OpenAIResponse(Reply):
    """POST /v1/responses, and GET of one that is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class OpenAIDeleted(Reply):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: bool


class OpenAIItems(Reply):
    """GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


OPERATIONS = (
    ApiOperation(
        "post",
        "/v1/responses",
        answering(_responses),
        "OpenAI: answer, stored for later turns",
        {JSON: OpenAIResponse, EVENTS: None},
        ResponsesBody,
        inference=True,
    ),
    ApiOperation("get", "/v1/responses/{id}", _get, "OpenAI: a stored response", {JSON: OpenAIResponse}),
    ApiOperation("delete", "/v1/responses/{id}", _delete, "OpenAI: forget a response", {JSON: OpenAIDeleted}),
    ApiOperation("get", "/v1/responses/{id}/input_items", _input_items, "OpenAI: its input", {JSON: OpenAIItems}),
    ApiOperation(
        "post", "/v1/responses/{id}/cancel", _cancel, "OpenAI: refused, none is in the background", {JSON: None}
    ),
)
