"""Stored responses over HTTP: read one, its input, delete it; and what a request refers to of earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from aiohttp import web
from pydantic import TypeAdapter

from worker_node.api.authorization import API_KEYS
from worker_node.api.body import note_ignored
from worker_node.core.errors import BadRequest, ResponseNotFound, UnsupportedParameter
from worker_node.tasks.generate.api.openai.reply import new_id
from worker_node.tasks.generate.api.openai.response_store import ResponseStore, StoredItem, StoredResponse
from worker_node.tasks.generate.api.openai.responses_body import CallItem, InputItem, Item, ItemReference, ResponsesBody

Json = dict[str, Any]
RESPONSES = web.AppKey("responses", ResponseStore)
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_SWEEP_S = 60.0
_PAGE = 20
_LARGEST_PAGE = 100
_one_item: TypeAdapter[Item] = TypeAdapter(Item)


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [
        web.get("/v1/responses/{id}", _get),
        web.delete("/v1/responses/{id}", _delete),
        web.get("/v1/responses/{id}/input_items", _input_items),
        web.post("/v1/responses/{id}/cancel", _cancel),
    ]


async def forget_expired(app: web.Application) -> AsyncIterator[None]:
    """For `app.cleanup_ctx`: what is too old leaves the memory also while there are no requests."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            app[RESPONSES].expire()

    task = asyncio.create_task(sweep())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


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
        # Calls that were cut have arguments that nobody can read, and no result.
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
    full = {"id": new_id(_PREFIXES[item.type]), "type": item.type, "status": "completed"} | plain
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
    return _json({"id": found.id, "object": "response", "deleted": True})


async def _cancel(request: web.Request) -> web.Response:
    found = _found(request)
    raise BadRequest(f"{found.id} was not made in the background; to cancel a response, close its connection")


async def _input_items(request: web.Request) -> web.Response:
    items = _found(request).input
    order, limit = request.query.get("order", "desc"), request.query.get("limit", str(_PAGE))
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _LARGEST_PAGE):
        raise BadRequest(f"limit: a number from 1 to {_LARGEST_PAGE}", param="limit")
    items = items if order == "asc" else items[::-1]
    if (after := request.query.get("after")) is not None:
        items = items[_index(items, after) + 1 :]
    page = items[: int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    data = [orjson.loads(item.data) for item in page]
    return _json(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(page) < len(items)}
    )


def _index(items: Sequence[StoredItem], item_id: str) -> int:
    for index, item in enumerate(items):
        if item.id == item_id:
            return index
    raise BadRequest(f"after: there is no item {item_id[:100]!r} in this input", param="after")


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json", charset="utf-8")
