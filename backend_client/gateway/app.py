"""The gateway's HTTP server: who may ask, the errors of each dialect, health and metrics; the rest is in `forward`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import traceback
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from backend_client.client import InferenceClient
from backend_client.errors import NPUError
from backend_client.gateway.forward import HOP, ID, TEAM, Forwarder, dialect_of, own_headers, refused
from backend_client.gateway.keys import EXPIRY_S, KeyStore, Registry, Team
from backend_client.gateway.limits import Limits, Metrics
from backend_client.gateway.page import OPEN_PATHS, STATE_PATH, add_page
from backend_client.gateway.settings import GatewaySettings, is_loopback
from backend_client.gateway.spending import Spending
from backend_client.http.errors import Problem, problem_of
from backend_client.http.messages import GATEWAY, new_request_id

log = logging.getLogger("npu_gateway")
_OPEN = frozenset({"/", "/health"}) | OPEN_PATHS
_ANNOUNCE = "/announce"
# What aiohttp decodes by itself; brotli, for want of a package, it refuses with a 400.
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
_MOST_ANNOUNCED = 8192
_LOOK_S = 1.0
# How long a use of the file of keys may take.
_PATIENCE_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ANYBODY = Team("anybody")


def make_app(settings: GatewaySettings, client: InferenceClient) -> web.Application:
    """The application; it closes the client when it ends. Raises ConfigurationError for a file of keys that is none."""
    keys = KeyStore(settings.keys, patience_s=_PATIENCE_S) if settings.keys is not None else None
    metrics = Metrics(client)
    limits = Limits(settings.store, metrics.store_failures.inc)
    spending = Spending(settings.store, keys.file, metrics.store_failures.inc) if keys else None
    registry = Registry(keys.file, settings.allowed_networks) if keys and settings.allowed_networks else None
    app = web.Application(middlewares=[_answering(settings, keys, metrics)], client_max_size=settings.max_body_bytes)

    async def health(_: web.Request) -> web.Response:
        state = client.healthz()
        found = {"status": "ready" if state.serving else "unavailable", "nodes_usable": state.nodes_usable}
        found |= {"server": GATEWAY, "cloud": state.cloud or "none"}
        return web.json_response(found, status=200 if state.serving else 503)

    async def announced(request: web.Request) -> web.Response:
        if registry is None:
            raise Problem(404, "not_found", "no node may announce itself here: set NPU_GATEWAY_ALLOWED_NETWORKS")
        if request.content_length is None or request.content_length > _MOST_ANNOUNCED:
            raise Problem(413, "payload_too_large", f"an announcement may have {_MOST_ANNOUNCED} bytes at most")
        content = await request.read()
        try:
            name = await registry.file.run(registry.announce, _bearer(request), content)
        except OSError:
            raise Problem(503, "unavailable", "the file of the enrolments cannot be written now", _LOOK_S) from None
        return web.json_response({"name": name})

    async def scraped(_: web.Request) -> web.Response:
        if keys is not None and spending is not None:
            with contextlib.suppress(OSError):
                for name, (spent, cap) in (await spending.spent(entry.team for entry in keys.entries)).items():
                    metrics.spend_ratio.labels(name).set(float(spent / cap) if cap else 1.0)
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/health", health)
    app.router.add_get("/metrics", scraped)
    app.router.add_post(_ANNOUNCE, announced)
    add_page(app, client, keys, metrics)
    app.add_routes(Forwarder(client, metrics, limits, spending).routes())

    async def running(_: web.Application) -> AsyncIterator[None]:
        # The nodes are known before the first request asks for one.
        tasks = [asyncio.create_task(_look(client))]
        if keys is not None:
            tasks.append(asyncio.create_task(_keep_reading(keys)))
        if registry is not None:
            tasks.append(asyncio.create_task(_register_announced(registry, client, metrics)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        await limits.close()
        if spending is not None:
            await spending.close()
        if keys is not None:
            keys.close()

    app.cleanup_ctx.append(running)
    return app


async def _look(client: InferenceClient) -> None:
    with contextlib.suppress(NPUError):
        await client.npu.health()


async def _keep_reading(keys: KeyStore) -> None:
    """Read the keys also while no request asks for them, so that they are never stale without a reason."""
    while True:
        await keys.refresh()
        await asyncio.sleep(_LOOK_S)


async def _register_announced(registry: Registry, client: InferenceClient, metrics: Metrics) -> None:
    """Let the nodes that announce themselves be the fleet's."""
    clock = asyncio.get_running_loop().time
    members: dict[str, str] = {}
    failed_at, why = -math.inf, ""
    while True:
        # After a failure the nodes have as much time to announce themselves as ever.
        kept = members if clock() - failed_at < EXPIRY_S else ()
        try:
            members = await registry.file.run(registry.members, kept)
        except OSError as error:
            before, failed_at, why = why, clock(), str(error) or type(error).__name__
            if why != before:
                log.warning("the announced nodes stay as they are: %s", why)
        else:
            why = ""
            client.npu.register(members)
            metrics.registered.set(len(members))
        await asyncio.sleep(_LOOK_S)


def _answering(settings: GatewaySettings, keys: KeyStore | None, metrics: Metrics) -> Middleware:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        given = request.headers.get("X-Request-ID", "")
        request[ID] = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        dialect, status = dialect_of(request.path, request.headers), 499
        try:
            try:
                if HOP in request.headers:
                    message = "this is an npu-gateway, and so is the sender: a gateway's nodes must be nodes"
                    raise Problem(508, "loop_detected", message)
                if keys is None:
                    _check_site(request, settings)
                request[TEAM] = await _team(request, keys)
                if request.headers.get("Content-Encoding", "").lower() not in _ENCODINGS:
                    raise Problem(415, "unsupported_media_type", "Content-Encoding must be gzip, deflate or identity")
                response = await handler(request)
            except (Problem, NPUError) as error:
                problem = error if isinstance(error, Problem) else problem_of(error)
                if problem.status == 401:
                    metrics.refused_keys.inc()
                response = refused(dialect, problem)
            except web.HTTPRequestEntityTooLarge:
                limit = settings.max_body_bytes
                response = refused(dialect, Problem(413, "payload_too_large", f"a body may have {limit} bytes at most"))
            except web.RequestPayloadError:
                response = refused(dialect, Problem(400, "invalid_request", "the body cannot be read as it is encoded"))
                # aiohttp closes the connection: a caller who is not told sends the next request in vain.
                response.force_close()
            except (web.HTTPException, ConnectionError):
                raise
            except Exception as error:  # noqa: BLE001  (a request must not end without an answer)
                # By its kind and place alone: its text may hold a prompt.
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = type(error).__name__
                log.error("%s: a bug of the gateway: %s at %s:%s", request[ID], kind, place.filename, place.lineno)
                response = refused(dialect, Problem(500, "internal_error", "internal error; the log has it by its id"))
            status = response.status
            if not response.prepared:
                response.headers.update(own_headers(request, dialect))
            return response
        finally:
            # Each open page asks for its state every second: that is no use of the fleet.
            if request.path != STATE_PATH or status >= 400:
                team = request.get(TEAM, _ANYBODY).name
                metrics.requests.labels(dialect, team, str(status)).inc()
                log.info("%s %s %d %.1f ms %s", dialect, team, status, (time.monotonic() - began) * 1e3, request[ID])

    return answer


def _check_site(request: web.Request, settings: GatewaySettings) -> None:
    """Raise Problem for a browser's request from another site, or for a name that was made to point here."""
    host = re.sub(r":\d+$", "", request.host or "").strip("[]").lower()
    if not is_loopback(host) and host not in {name.lower() for name in settings.allowed_hosts}:
        raise Problem(403, "forbidden", "the Host header does not name this gateway; add the name to allowed_hosts")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != (request.host or "").lower():
        raise Problem(403, "forbidden", "requests from pages of other sites are refused")


async def _team(request: web.Request, keys: KeyStore | None) -> Team:
    # Nodes have keys of their own.
    if keys is None or (request.path in _OPEN and request.method in {"GET", "HEAD"}) or request.path == _ANNOUNCE:
        return _ANYBODY
    given = _bearer(request)
    try:
        team = await keys.team_of(given)
    except OSError as error:
        raise Problem(503, "unavailable", str(error), _LOOK_S) from None
    if team is None:
        raise Problem(401, "invalid_api_key", "send a key of this gateway as Authorization: Bearer KEY, or x-api-key")
    return team


def _bearer(request: web.Request) -> str:
    """The key that a request carries. Raises Problem for two."""
    if len(request.headers.getall("Authorization", ())) > 1:
        raise Problem(401, "invalid_api_key", "the request must have one Authorization header")
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
