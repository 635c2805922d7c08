"""`keep_alive`: how long a model stays in memory after a request, in the form that Ollama gave it."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from worker_node.api.arrival import deadline_of
from worker_node.api.keys import STATE
from worker_node.core.errors import BadRequest
from worker_node.manager.served import ServedModel

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 10 * 365 * 86400.0

KeepAlive = str | float


def seconds_of(keep_alive: KeepAlive) -> float | None:
    """How long a model stays in memory; None for good. Raises BadRequest for what is no duration."""
    if isinstance(keep_alive, int | float):
        seconds = float(keep_alive)
    else:
        sign, text = (-1.0, keep_alive[1:]) if keep_alive.startswith("-") else (1.0, keep_alive)
        if text.isdecimal() and len(text) < 12:
            seconds = sign * float(text)
        elif len(text) < 64 and _DURATION.sub("", text) == "" and text:
            seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
        else:
            raise BadRequest("keep_alive is a number of seconds or a duration as 5m or 1h30m", param="keep_alive")
    return None if seconds < 0 or math.isinf(seconds) or seconds > _LONGEST_S else seconds


@asynccontextmanager
async def keeping(request: web.Request, model: ServedModel | str, keep_alive: KeepAlive | None) -> AsyncIterator[None]:
    """Keep the model in memory for that long after the block, however it ends.

    Raises BadRequest, and what `ModelManager.resolve` raises, before it.
    """
    if keep_alive is None:
        yield
        return
    seconds = seconds_of(keep_alive)
    if isinstance(model, str):
        model = await request[STATE].node.manager.resolve(model, deadline_of(request))
    try:
        yield
    finally:
        state = request[STATE]
        if state.dry_run is None:
            state.node.manager.keep(model, seconds)
