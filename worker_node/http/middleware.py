"""The middlewares of every request: its id, the drain gate, errors as JSON, a trace, one line in the log."""

from __future__ import annotations

import logging
import random
import re
import time
import traceback
from collections.abc import Callable
from weakref import WeakSet

from aiohttp import web
from aiohttp.hdrs import METH_ALL
from aiohttp.typedefs import Middleware

from worker_node.core.errors import BadRequest, Draining, InternalError, MethodNotAllowed, NodeError, RouteNotFound
from worker_node.http.access import OPEN_PATHS, Check
from worker_node.http.context import FAULTS, NODE, SERVER, STATE, RequestState, labels
from worker_node.http.replies import ANTHROPIC_VERSION, Renderer
from worker_node.http.routes import Handler
from worker_node.observability.tracing import Tracing, set_response_status

log = logging.getLogger(__name__)
access_log = logging.getLogger("worker_node.access")

_WATCHED = OPEN_PATHS | {"/dashboard/state"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# They tell requests apart and open nothing: not worth a system call for each.
_IDS = random.Random()


def request_id(request: web.BaseRequest) -> str:
    """The caller's `X-Request-ID` if it is a plain token, else a new `req_` and 24 hex digits."""
    given = request.headers.get("X-Request-ID", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{_IDS.getrandbits(96):024x}"


def route_template(request: web.Request) -> str:
    """The route that serves the request, as it was declared, or `-`: never text of the caller's."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "-"


async def begin_reply(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: an error gets no reply of its own from now on, and no version is named."""
    if (state := request.get(STATE)) is not None:
        state.begun = True
    response.headers["Server"] = SERVER


async def name_as_npu_proxy(_request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: npu-proxy's names of the headers beside ours."""
    for name in ("Device", "Route-Reason", "Token-Count"):
        if (value := response.headers.get(f"X-NPU-Node-{name}")) is not None:
            response.headers[f"X-NPU-Proxy-{name}"] = value


async def describe_request(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: name the request's id, and list its ignored fields, which are counted."""
    state = request.get(STATE)
    response.headers["X-Request-ID"] = identity = request_id(request) if state is None else state.id
    if ANTHROPIC_VERSION in request.headers:
        # Anthropic's clients show this one in their errors.
        response.headers["request-id"] = identity
    if state is None or state.ignored is None:
        return
    if not state.ignored.names and not state.ignored.limited:
        return
    response.headers["X-NPU-Node-Ignored"] = state.ignored.header()
    telemetry = state.node.telemetry
    for label in labels(state.ignored, telemetry.ignored_names):
        telemetry.ignored_fields.labels(label).inc()


def log_requests(identify: Callable[[web.Request], str] = request_id) -> Middleware:
    """Give each request its arrival time and, from `identify`, its id; log method, route, status, duration and that id,
    and nothing else of what the caller wrote.
    """

    @web.middleware
    async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        arrived = time.monotonic()
        request[STATE] = state = RequestState(request.app[NODE], identify(request), arrived)
        status: int | str = "cancelled"
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            status = state.complete or status
            route = route_template(request)
            state.node.services.telemetry.http_requests.labels(route, str(status)).inc()
            # Health is asked for every second by everything that watches: not worth a line each.
            level = logging.DEBUG if request.path in _WATCHED else logging.INFO
            if access_log.isEnabledFor(level):
                method = request.method if request.method in METH_ALL else "-"
                milliseconds = (time.monotonic() - arrived) * 1e3
                access_log.log(level, "%s %s %s %.1f ms %s", method, route, status, milliseconds, state.id)

    return log_request


def note_failure(request: web.Request, error: NodeError) -> None:
    request.app[NODE].telemetry.failed(route_template(request), error)


def errors_as(form: Callable[[web.Request], Renderer], *checks: Check) -> Middleware:
    """Turn every failure into the form for its request; log an unforeseen one by type and place, never by content.

    Before the handler come the `checks`, which may raise, or answer the request themselves.
    """

    @web.middleware
    async def render(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            for check in checks:
                if (answer := check(request)) is not None:
                    return answer
            return await handler(request)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001  (the last line of defence; CancelledError passes)
            failure = _as_node_error(request, error)
            allowed = error.allowed_methods if isinstance(error, web.HTTPMethodNotAllowed) else ()
        note_failure(request, failure)
        if (state := request.get(STATE)) is not None and state.begun:
            # A second reply would arrive inside the first one, and an end would make that look complete.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reply had begun when it failed") from None

        response = form(request)(failure)
        served = (model for model in request.app[NODE].manager.models if model.id == failure.model)
        failed_on = (place for model in served for place in model.placements if place.device == failure.device)
        # How many faults on demand the engine has that the request failed on.
        if faults := next((len(place.faults) for place in failed_on), 0):
            response.headers[FAULTS] = str(faults)
        if allowed:
            response.headers["Allow"] = ", ".join(sorted(allowed))
        if "Expect" in request.headers and not request.content.is_eof():
            # The client need not send the body any more, so what follows on this connection may be either.
            response.force_close()
        return response

    return render


def _as_node_error(request: web.Request, error: Exception) -> NodeError:
    if isinstance(error, NodeError):
        return error
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"{request.path[:200]} takes {', '.join(sorted(error.allowed_methods))}")
    if isinstance(error, web.HTTPNotFound):
        return RouteNotFound(f"there is no {request.path[:200]} here")
    if isinstance(error, web.HTTPException):
        return BadRequest(f"the request was refused: {error.reason}")
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    place = " > ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames)
    log.error("%s in %s at %s", type(error).__name__, request[STATE].id, place)
    return InternalError("the node failed to answer; its log says where")


_INFERENCE: WeakSet[object] = WeakSet()


def inference(handler: Handler) -> Handler:
    """Mark a handler as inference: refused while the node drains, waited for when it does."""

    async def gated(request: web.Request) -> web.StreamResponse:
        state = request[STATE].node.state
        if state.draining:
            raise Draining("this node is shutting down and takes no new requests; use another one")
        with state.working():
            return await handler(request)

    _INFERENCE.add(gated)
    return gated


def traced(tracing: Tracing) -> Middleware:
    """Trace inference requests; health, metrics and lists are asked for too often to be worth a span."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route
        if route.resource is None or route.handler not in _INFERENCE:
            return await handler(request)
        state, template = request[STATE], route.resource.canonical
        with tracing.request(request.method, template, request.headers, state.id, state.arrived) as span:
            response = await handler(request)
            set_response_status(span, response.status)
            return response

    return trace
