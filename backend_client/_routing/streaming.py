"""A streamed answer of one node: held back until it has begun, then handed on as it comes, without a second attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from backend_client._fleet.lease import Lease
from backend_client._fleet.pool import Pool
from backend_client._routing.dispatcher import Call, Dispatcher
from backend_client.errors import ConnectionLost, NPUError, StreamInterrupted

I = TypeVar("I")  # noqa: E741  (an item of a stream)


@dataclass(frozen=True, slots=True)
class Reading(Generic[I]):
    """How the items of a stream are read: which one begins and ends the answer, and the text that each adds."""

    begins: Callable[[I], bool]
    ends: Callable[[I], bool]
    text: Callable[[I], str]


@dataclass(slots=True)
class Opened(Generic[I]):
    """A stream that has begun; `held` are its items so far."""

    items: AsyncGenerator[I, None]
    held: list[I]


async def open_stream(pool: Pool, lease: Lease, items: AsyncGenerator[I, None], reading: Reading[I]) -> Opened[I]:
    """Return once the answer has begun. Raises what the stream raises."""
    held: list[I] = []
    try:
        async for item in items:
            held.append(item)
            if reading.begins(item) or reading.ends(item):
                pool.heard(lease)
                return Opened(items, held)
    except BaseException:
        await items.aclose()
        raise
    raise ConnectionLost("the stream ended before the answer began", node=lease.node.url)


async def read_whole(pool: Pool, lease: Lease, opened: Opened[I], reading: Reading[I]) -> list[I]:
    """All items up to the last one. Raises what the stream raises."""
    items = opened.held
    try:
        while not reading.ends(items[-1]):
            try:
                items.append(await anext(opened.items))
            except StopAsyncIteration:
                break
            pool.heard(lease)
        else:
            return items
    finally:
        await opened.items.aclose()
    raise ConnectionLost("the stream ended before the answer did", node=lease.node.url)


async def follow(
    pool: Pool, dispatcher: Dispatcher, call: Call, lease: Lease, opened: Opened[I], reading: Reading[I]
) -> AsyncGenerator[I, None]:
    """Yield all items up to the last one, and settle the lease.

    Raises StreamInterrupted, with the text so far, when the stream fails; it is neither retried nor taken over.
    """
    parts: list[str] = []
    item: I | None = None
    # What holds when the caller leaves in the middle: it says nothing of the node.
    ended: BaseException | None = asyncio.CancelledError()
    try:
        for item in opened.held[:-1]:
            parts.append(reading.text(item))
            yield item
        item = opened.held[-1]
        while not reading.ends(item):
            parts.append(reading.text(item))
            yield item
            with dispatcher.calls.open():
                item = await dispatcher.guard(call, lease, _following(opened, lease))
            pool.heard(lease)
        ended = None
    except NPUError as error:
        ended = error
    finally:
        dispatcher.settle(call, lease, ended)
        await opened.items.aclose()
    if ended is None and item is not None:
        yield item
    elif isinstance(ended, NPUError):
        raise StreamInterrupted.after(parts, ended, attempts=call.attempts, request_id=call.request_id)


async def _following(opened: Opened[I], lease: Lease) -> I:
    try:
        return await anext(opened.items)
    except StopAsyncIteration:
        pass
    raise ConnectionLost("the stream ended before the answer did", node=lease.node.url)
