"""The request headers that every dialect understands, and the reply headers that every inference has."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from aiohttp import web

from worker_node.core.errors import BadRequest, DeadlineExceeded
from worker_node.core.types import NOT_MEASURED, Busy, Device, Priority, RequestContext, Route, Timing
from worker_node.node import Node

# What replies name as their server: no version of anything.
SERVER = "npu-node"
# How many faults on demand the engine of a reply has.
FAULTS = "X-NPU-Node-Faults"
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")
# The time until a streamed answer must begin, and until any answer must be complete.
_START, _WHOLE = "X-NPU-Start-Timeout-Ms", "X-Request-Timeout-Ms"
_MILLISECONDS = re.compile(r"-?[0-9]{1,12}")

_SHOWN_FIELDS = 16
_NAME_LENGTH = 64
_MOST_LABELS = 64
# What a token of RFC 8941 may hold, so that a name cannot break out of the header.
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.:-]")
E = TypeVar("E", bound=StrEnum)


@dataclass(slots=True)
class Ignored:
    """The fields of one request that had no effect, by path without indices; at most a few are kept by name.

    `limited` are fields that asked for more than is available, with what is available.
    """

    names: set[str] = field(default_factory=set)
    limited: dict[str, int] = field(default_factory=dict)
    more: int = 0

    def add(self, path: str) -> None:
        name = _NO_TOKEN.sub("_", path)[:_NAME_LENGTH]
        if name in self.names:
            return
        if len(self.names) < _SHOWN_FIELDS:
            self.names.add(name)
        else:
            self.more += 1

    def header(self) -> str:
        """The value of `X-NPU-Node-Ignored`, a list of RFC 8941: `service_tier, top_logprobs;limited=1`."""
        items = sorted(self.names)
        items += [f"{name};limited={count}" for name, count in sorted(self.limited.items())]
        if self.more:
            items.append(f"and-more;fields={self.more}")
        # A token begins with a letter or a star.
        return ", ".join(item if item[:1].isalpha() else f"*{item}" for item in items)


@dataclass(slots=True)
class RequestState:
    """What the HTTP side knows of a request: one object, since each key of a request or an application costs calls.

    It `arrived` at that monotonic time. `ignored` are its fields without effect; None where nobody lists them.
    `begun`: the head of the reply has gone; `complete`, its status, once all of a stream has been written.
    """

    node: Node
    id: str
    arrived: float
    ignored: Ignored | None = None
    begun: bool = False
    complete: int | None = None


NODE = web.AppKey("node", Node)
STATE = web.RequestKey("state", RequestState)


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
        engine_deaths=_whole(headers, "X-NPU-Engine-Deaths", 0) or 0,
        deadline=deadline_of(request),
        ends=state.arrived + _timeout_s(request, _WHOLE),
    )


def deadline_of(request: web.Request) -> float:
    """The request's deadline in monotonic seconds. Raises BadRequest, DeadlineExceeded."""
    longest = request[STATE].node.settings.request_timeout_s
    return request[STATE].arrived + min(longest, _timeout_s(request, _START), _timeout_s(request, _WHOLE))


def _timeout_s(request: web.Request, name: str) -> float:
    header = request.headers.get(name)
    if header is None:
        return math.inf
    if not _MILLISECONDS.fullmatch(header):
        raise BadRequest(f"{name} is the remaining time in whole milliseconds", param=name)
    if int(header) <= 0:
        raise DeadlineExceeded("the request's time was up when it arrived", param=name)
    return int(header) / 1000


def _whole(headers: Mapping[str, str], name: str, least: int) -> int | None:
    header = headers.get(name)
    if header is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(header) or int(header) < least:
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
    if (joules := _joules(busy)) is not None:
        headers["X-NPU-Node-Joules"] = f"{joules:.6f}"
    return headers


def timing_ms(timing: Timing, *stages: str) -> dict[str, float | None]:
    """Milliseconds of these stages; None where a stage did not happen."""
    values = {stage: getattr(timing, stage) for stage in stages}
    return {stage: None if value is None else round(value, 3) for stage, value in values.items()}


def busy_of(parts: Sequence[Busy]) -> Busy:
    return functools.reduce(Busy.plus, parts)


def busy_fields(busy: Busy, *, whole: bool = False) -> dict[str, int | float | str | None]:
    """The busy time and the energy as fields of a body; what was not measured is left out, or null if `whole`.

    Streams send them in their last object, because their headers are gone by then.
    """
    fields: dict[str, int | float | str | None] = {"npu_busy_delta_us": busy.us, "joules": _joules(busy)}
    if whole and fields["joules"] is None:
        fields["joules_reason"] = busy.energy.reason or "the counter did not move during the run"
    if busy.us is not None and busy.shared:
        fields["npu_busy_exclusive"] = False
    return fields if whole else {name: value for name, value in fields.items() if value is not None}


def _joules(busy: Busy) -> float | None:
    """The energy; None also for 0, which is less than the counter can show."""
    return round(busy.energy.joules or 0, 6) or None


def labels(ignored: Ignored, seen: set[str]) -> set[str]:
    """The fields as metric labels: the first names that were `seen`, all others as `other`."""
    found = set()
    for path in ignored.names | ignored.limited.keys():
        name = path.rpartition(".")[2]
        if len(seen) < _MOST_LABELS:
            seen.add(name)
        found.add(name if name in seen else "other")
    return found
