"""Who may call the node: holders of its API keys, and web pages of the origins that the settings name.

A browser lets any page send requests to this machine, and a page whose own name was made to point here (DNS rebinding)
may read the replies too. A node that asks for no key therefore answers only to its own names and only to its own pages.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

from aiohttp import web

from worker_node.core.errors import BadRequest, Forbidden, Unauthorized
from worker_node.settings import NodeSettings, is_loopback

# A check of each request before its handler: it may raise, or answer the request itself.
Check = Callable[[web.Request], web.StreamResponse | None]

# Load balancers and kubelets hold no keys; these say whether the node serves, and nothing of what it serves.
# The pages for people are the same everywhere; what the dashboard shows comes from /dashboard/state, for key holders.
OPEN_PATHS = frozenset(
    {"/", "/docs", "/favicon.ico", "/health", "/health/live", "/health/ready", "/dashboard", "/play"}
)

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_METHODS = "GET, HEAD, POST, DELETE"
_EXPOSED = (
    "Retry-After, retry-after-ms, X-Model, X-NPU-Busy-Delta-Us, X-NPU-Busy-Exclusive, X-NPU-Emulated, "
    "X-NPU-Node-Cache, X-NPU-Node-Device, X-NPU-Node-Devices, X-NPU-Node-Faults, X-NPU-Node-Ignored, "
    "X-NPU-Node-Joules, "
    "X-NPU-Node-Route-Reason, X-NPU-Node-Token-Count, X-Request-ID, X-Shape, X-Space"
)


class Access:
    """The keys, names and pages that the settings of a node admit, and nothing else.

    Where it has keys these decide, and only malformed headers are refused; without keys, foreign names and origins are.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.adopt(settings)

    def adopt(self, settings: NodeSettings) -> None:
        """Follow these settings, from the next request on."""
        keys = [key.get_secret_value() for key in settings.api_keys]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._bind = settings.host.lower()
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in settings.cors_origins)

    def authorize(self, request: web.Request) -> bool:
        """Whether the request may do what key holders may; Anthropic's clients send the key as x-api-key."""
        if not self._digests:
            return True
        given = request.headers.get("x-api-key", "")
        if (authorization := request.headers.get("Authorization")) is not None:
            scheme, _, given = authorization.partition(" ")
            if scheme.lower() != "bearer":
                return False
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        # All are compared, in constant time, so that the time tells neither which key matched nor whether one did.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def check_key(self, request: web.Request) -> None:
        """Raise Unauthorized for a request without one of the keys, except on the paths that are open to all."""
        if request.path not in OPEN_PATHS and not self.authorize(request):
            sent = "Authorization" in request.headers or "x-api-key" in request.headers
            wrong = "the API key that was sent is wrong: " if sent else ""
            raise Unauthorized(
                f"{wrong}send one of this node's API keys as Authorization: Bearer KEY, or as x-api-key: KEY"
            )

    def check_origin(self, request: web.Request) -> web.StreamResponse | None:
        """Answer the preflight requests of browsers for the origins that are let in.

        Raises BadRequest for a malformed Host or Origin, Forbidden for a foreign one.
        """
        authority, guarded = _authority(request), not self._digests
        if authority is not None and guarded and not self._is_ours(authority[0], request):
            raise Forbidden(
                "the Host header does not name this node; use its address, or add the name to allowed_hosts"
            )
        origins = request.headers.getall("Origin", [])
        if len(origins) > 1:
            raise BadRequest("the request has more than one Origin header")
        if not origins:
            return None
        opened = self.opens_to(origins[0])
        if guarded and not opened and not _same(origins[0], authority):
            raise Forbidden("requests from pages of other sites are refused; add the site to cors_origins to allow it")
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        return _preflight(request) if asks and opened else None

    def opens_to(self, origin: str) -> bool:
        """Whether `cors_origins` names the origin."""
        scheme, _, rest = origin.lower().partition("://")
        match = _AUTHORITY.fullmatch(rest)
        any_port = "" if match is None else f"{scheme}://{match[1]}:*"
        return not self._origins.isdisjoint({"*", origin.lower(), any_port})

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `on_response_prepare`: pages of the origins that are let in may read every reply, errors included."""
        origin = request.headers.get("Origin")
        if self._origins:
            response.headers.add("Vary", "Origin")
        if origin is not None and self.opens_to(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _is_ours(self, host: str, request: web.Request) -> bool:
        if is_loopback(host) or host == self._bind or "*" in self._hosts or host in self._hosts:
            return True
        if any(host.endswith(name[1:]) for name in self._hosts if name.startswith("*.")):
            return True
        # A node on all addresses has the one on which this very connection was accepted: no page can have a name for
        # it that a browser sends.
        name = None if request.transport is None else request.transport.get_extra_info("sockname")
        if self._bind not in {"", "0.0.0.0", "::"} or not isinstance(name, tuple):  # noqa: S104  (compared, not bound)
            return False
        return host == str(name[0]).partition("%")[0].lower().removeprefix("::ffff:")


ACCESS = web.AppKey("access", Access)


def _preflight(request: web.Request) -> web.Response:
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600"}
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    if _HEADER_NAMES.fullmatch(wanted):
        headers["Access-Control-Allow-Headers"] = wanted
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _authority(request: web.Request) -> tuple[str, str | None] | None:
    """The host, in lower case, and the port that the request is for; None where HTTP/1.0 names none.

    Raises BadRequest for none or several in HTTP/1.1, a malformed one, and a target that names another than the header.
    """
    if request.version < (1, 0):
        raise BadRequest("HTTP/0.9 is not spoken here; use HTTP/1.1")
    given = request.headers.getall("Host", [])
    if len(given) > 1 or (not given and request.version >= (1, 1)):
        raise BadRequest(f"the request has {len(given)} Host headers; HTTP/1.1 has exactly one")
    if not given:
        if not request.raw_path.startswith("/"):
            raise BadRequest("a request without a Host header has a target that begins with /")
        return None
    match = _AUTHORITY.fullmatch(given[0].strip())
    if match is None:
        raise BadRequest("the Host header must be a host name or an address, with an optional port")
    host = _plain(match[1])
    # For a target that is a whole URL, this is that URL's host.
    if not request.raw_path.startswith(("/", "*")) and _plain(request.host or "") != host:
        raise BadRequest("the target of the request names another host than its Host header")
    return host, match[2]


def _plain(host: str) -> str:
    return host.lower().strip("[]").removesuffix(".")


def _same(origin: str, authority: tuple[str, str | None] | None) -> bool:
    """Whether a page of that origin came from the host and port that the request is for."""
    if authority is None:
        return False
    scheme, _, rest = origin.lower().partition("://")
    match = _AUTHORITY.fullmatch(rest)
    if match is None or scheme not in _DEFAULT_PORTS:
        return False
    port = _DEFAULT_PORTS[scheme]
    return _plain(match[1]) == authority[0] and (match[2] or port) == (authority[1] or port)
