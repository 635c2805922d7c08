"""Deadlines of a request: for all of it, and for the arrival of its body."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from worker_node.api.keys import STATE
from worker_node.core.errors import BadRequest, DeadlineExceeded, RequestTimeout

_MILLISECONDS = re.compile(r"-?[0-9]{1,12}")


def deadline_of(request: web.Request) -> float:
    """The request's deadline in monotonic seconds. Raises BadRequest, DeadlineExceeded."""
    state = request[STATE]
    headers = request.headers if state.dry_run is None else state.dry_run.headers
    return state.arrived + _timeout_s(headers, state.node.settings.request_timeout_s)


@asynccontextmanager
async def arrival(request: web.Request) -> AsyncIterator[None]:
    """Bounds the time in which the body is read in this block: each piece must arrive within `silence` seconds.

    Raises RequestTimeout when the sender falls silent, and DeadlineExceeded when the request's deadline passes first,
    so that a byte now and then holds a connection neither for hours nor beyond the caller's deadline.
    """
    deadline = deadline_of(request)
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())) as scope:
            yield
    except TimeoutError:
        # Not by the clock: a loop's timers end up to a millisecond early.
        if scope.expired():
            raise DeadlineExceeded("the request's time was up before its body had arrived") from None
        limit = request[STATE].node.settings.body_timeout_s
        raise RequestTimeout(f"the body stopped arriving for {limit:g} s") from None


def silence(request: web.Request) -> asyncio.Timeout:
    """The limit on the wait for the next piece of a body."""
    return asyncio.timeout(request[STATE].node.settings.body_timeout_s)


def _timeout_s(headers: Mapping[str, str], longest: float) -> float:
    header = headers.get("X-Request-Timeout-Ms")
    if header is None:
        return longest
    if not _MILLISECONDS.fullmatch(header):
        raise BadRequest(
            "X-Request-Timeout-Ms is the remaining time in whole milliseconds", param="X-Request-Timeout-Ms"
        )
    if int(header) <= 0:
        raise DeadlineExceeded("the request's time was up when it arrived", param="X-Request-Timeout-Ms")
    return min(int(header) / 1000, longest)
