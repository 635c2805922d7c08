"""Spans of what a node does for a request, in the caller's trace. Off unless the settings say otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import RequestContext, Route, Usage
from worker_node.engines.protocol import Engine

# What the rooms of the node tell of a request's stages, whether or not anybody traces.
#
# Times are `time.monotonic()` seconds. `Tracing` and `Operation` themselves do nothing: they are what a node has whose
# tracing is off, and nothing of OpenTelemetry is imported for them.


class Operation:
    """One inference, from its tokens to its answer. Each stage is reported when it is over."""

    def tokenized(self, began: float) -> None:
        """The prompt was tokenized, from `began` until now."""

    def routed(self, route: Route) -> None:
        """The placement is chosen; that took from the tokens until now, the wait for its load included."""

    def submitted(self, engine: Engine) -> None:
        """The engine is given the job now."""

    def started(self, at: float) -> None:
        """The engine process took the job up, by its own clock."""

    def ran(self, began: float, ended: float) -> None:
        """The engine process ran the job from then to then, by its own clock."""

    def first_token(self, at: float) -> None:
        """The engine process had the first token."""

    def ended(self, at: float) -> None:
        """The engine process had the last token."""

    def answered(
        self,
        usage: Usage,
        *,
        finish_reason: str | None = None,
        busy_us: int | None = None,
        busy_shared: bool = False,
        cached: str | None = None,
    ) -> None:
        """The answer is complete."""

    def watch(self) -> AbstractContextManager[None]:
        """A failure in the block is the operation's, also where the caller makes an answer of it."""
        return nullcontext()


class ServerRequest:
    """One HTTP request."""

    def responded(self, status: int) -> None:
        """It was answered with this status."""


NOTHING: Mapping[str, float | str] = {}
_REQUEST = nullcontext(ServerRequest())
_OPERATION = nullcontext(Operation())


class Tracing:
    """The tracing of a node; this one is off."""

    enabled = False

    def request(
        self, _method: str, _route: str, _headers: Mapping[str, str], _request_id: str, _arrived: float, /
    ) -> AbstractContextManager[ServerRequest]:
        """Trace the HTTP request that is served while the block runs, as a part of the caller's trace if it has one.

        The route is its pattern, not the path that was asked for.
        """
        return _REQUEST

    def operation(
        self, _name: str, _context: RequestContext, _attributes: Mapping[str, float | str] = NOTHING, /
    ) -> AbstractContextManager[Operation]:
        """Trace an operation, by the name that its task gives it, while the block runs.

        The attributes are numbers and names that the node made itself: nothing of a request's text.
        """
        return _OPERATION

    async def close(self) -> None:
        """Send what was not sent yet."""


OFF = Tracing()


# Which tracing a node has.


def open_tracing(*, enabled: bool) -> Tracing:
    """The tracing that the settings ask for. Raises ConfigurationError when what it needs is not installed."""
    if not enabled:
        return OFF
    try:
        # Who does not trace need not have OpenTelemetry, nor pay for importing it.
        from worker_node.observability.spans import otlp_tracing  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"tracing is on and {error.name} is not installed; run: pip install 'npu-node[tracing]', or leave "
            "tracing out"
        ) from error
    return otlp_tracing()


# The attributes of spans: GenAI's semantic conventions where they have a name, `npu.` where they have none.
#
# Numbers and names that the node made itself, and nothing of a request's text: no prompt, answer, stop sequence, tool,
# user's name for a model, or key.

Attributes = dict[str, str | bool | int | float | list[str]]

# Those of a route that the engine's own span repeats.
ENGINE = ("gen_ai.response.model", "npu.device", "npu.emulated")


def of_operation(name: str) -> Attributes:
    """What every inference has."""
    return {"gen_ai.operation.name": name, "gen_ai.provider.name": "npu-node"}


def of_route(route: Route) -> Attributes:
    """Where it runs, and why there.

    The model that was asked for is told by the id that its name stands for: the name itself is the user's text.
    """
    return {
        "gen_ai.request.model": route.model,
        "gen_ai.response.model": route.model,
        "gen_ai.usage.input_tokens": route.token_count,
        "npu.device": route.device.value,
        "npu.emulated": route.emulated,
        "npu.route_reason": route.reason,
    }


def of_answer(usage: Usage, finish_reason: str | None, cached: str | None) -> Attributes:
    """What came of it."""
    found: Attributes = {"gen_ai.usage.input_tokens": usage.prompt_tokens}
    if finish_reason is not None:
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.response.finish_reasons"] = [finish_reason]
    if cached is not None:
        found["npu.cache"] = cached
    return found


def of_busy_time(busy_us: int | None, *, shared: bool) -> Attributes:
    """The NPU's measured busy time; nothing where no NPU ran.

    `npu.busy_exclusive` is there only as False, where others are known to have used the NPU: the rest cannot be known.
    """
    if busy_us is None:
        return {}
    found: Attributes = {"npu.busy_time_us": busy_us}
    if shared:
        found["npu.busy_exclusive"] = False
    return found


# Wall times, which spans have, from monotonic ones, which everything else here has.

# A reading during which the process was put to sleep says nothing.
_TIGHT_NS = 50_000
# What is less than this is jitter of the reading; what is more, somebody set the clock.
_STEP_NS = 1_000_000


class WallClock:
    """Nanoseconds since the epoch. All spans of a request are dated by one offset, so that none begins before its
    parent does."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()
        self.look()

    def look(self) -> None:
        """Follow the wall clock, if it was set since the last look."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        offset = wall - (before + after) // 2
        if after - before < _TIGHT_NS and abs(offset - self._offset) > _STEP_NS:
            self._offset = offset

    def at(self, monotonic: float) -> int:
        """The wall time at `time.monotonic()` seconds."""
        return self._offset + round(monotonic * 1e9)

    def now(self) -> int:
        """The wall time now."""
        return self._offset + time.monotonic_ns()
