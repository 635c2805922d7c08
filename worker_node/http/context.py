"""The request headers that every dialect understands, and the reply headers that every inference has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from aiohttp import web

from worker_node.core.errors import BadRequest
from worker_node.core.types import NOT_MEASURED, Busy, Device, Priority, RequestContext, Route, Timing
from worker_node.http.body import deadline_of, end_of_stream
from worker_node.http.request_state import STATE

# What replies name as their server: no version of anything.
SERVER = "npu-node"
# How many faults on demand the engine of a reply has.
FAULTS = "X-NPU-Node-Faults"
_WHOLE = re.compile(r"[0-9]{1,9}")
E = TypeVar("E", bound=StrEnum)


def request_context(request: web.Request) -> RequestContext:
    """Read the common headers. Raises BadRequest for a malformed one, DeadlineExceeded if the deadline has passed."""
    state = request[STATE]
    headers = request.headers
    restart_wait_ms = _whole(headers, "X-NPU-Restart-Wait-Ms", 0)
    return RequestContext(
        request_id=state.id,
        arrived=state.arrived,
        interactive=_choice(headers, "X-Priority", Priority) is not Priority.BATCH,
        require_device=_choice(headers, "X-NPU-Require-Device", Device),
        min_new_tokens=_whole(headers, "X-NPU-Min-New-Tokens", 1) or 1,
        restart_wait_s=None if restart_wait_ms is None else restart_wait_ms / 1000,
        deadline=deadline_of(request),
        ends=end_of_stream(request),
    )


def _whole(headers: Mapping[str, str], name: str, least: int) -> int | None:
    header = headers.get(name)
    if header is None:
        return None
    if not _WHOLE.fullmatch(header) or int(header) < least:
        raise BadRequest(f"{name} must be a whole number, at least {least}", param=name)
    return int(header)


def _choice(headers: Mapping[str, str], name: str, kind: type[E]) -> E | None:
    header = headers.get(name)
    if header is None:
        return None
    for value in kind:
        if value.casefold() == header.strip().casefold():
            return value
    raise BadRequest(f"{name} must be one of {', '.join(kind)}", param=name)


def route_headers(route: Route, busy: Busy = NOT_MEASURED) -> dict[str, str]:
    headers = {
        "X-Model": route.model,
        "X-NPU-Node-Device": route.device.value,
        "X-NPU-Node-Route-Reason": route.reason,
        "X-NPU-Node-Token-Count": str(route.token_count),
    }
    if route.parts:
        headers["X-NPU-Node-Devices"] = ", ".join(f"{part}={device}" for part, device in route.parts.items())
    if route.emulated:
        headers["X-NPU-Emulated"] = "true"
    if route.faults:
        headers[FAULTS] = str(route.faults)
    if route.unproven:
        headers["X-NPU-Proven"] = "false"
    if busy.us is not None:
        headers["X-NPU-Busy-Delta-Us"] = str(busy.us)
        if busy.shared:
            headers["X-NPU-Busy-Exclusive"] = "false"
    return headers


def timing_ms(timing: Timing, *stages: str) -> dict[str, float | None]:
    """Milliseconds of these stages; None where a stage did not happen."""
    values = {stage: getattr(timing, stage) for stage in stages}
    return {stage: None if value is None else round(value, 3) for stage, value in values.items()}


def busy_fields(busy: Busy) -> dict[str, int | bool]:
    """The busy time as fields of a body; none where nothing was measured.

    Streams send them in their last object, because their headers are gone by then.
    """
    if busy.us is None:
        return {}
    return {"npu_busy_delta_us": busy.us, **({"npu_busy_exclusive": False} if busy.shared else {})}
