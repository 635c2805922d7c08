"""Images that requests name by URL, fetched from the hosts that the settings name."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import CollectorRegistry, Counter
from yarl import URL

from worker_node.core.errors import BadRequest, DeadlineExceeded, NodeError, Overloaded, PayloadTooLarge
from worker_node.node import Node
from worker_node.settings import NodeSettings
from worker_node.settings.node import ImageHost
from worker_node.tasks.generate.images import image_decoder
from worker_node.tasks.generate.model import FORMATS, IMAGE_TYPES

SETTING = "allow_image_hosts"
_LONGEST_URL = 4096
# Not blanks, control characters, or backslashes, which some take for slashes.
_NOT_OF_A_URL = re.compile(r"[\x00-\x20\x7f\\]")
_CHUNK = 1 << 16
_RECEIVE_BUFFER = 1 << 17
_HEADERS = {"Accept": ", ".join(sorted(IMAGE_TYPES)), "Accept-Encoding": "identity", "User-Agent": "npu-node"}
# Native addresses of the IPv6 internet; in it, 6to4 carries IPv4 addresses, and 3fff::/20 is for examples.
_IPV6_INTERNET = ipaddress.IPv6Network("2000::/3")
_NOT_NATIVE = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("3fff::/20"))

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local, multicast or reserved.

    Of IPv6 addresses that carry an IPv4 address only the mapped form may be public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            native = parsed in _IPV6_INTERNET and not any(parsed in network for network in _NOT_NATIVE)
            return native and parsed.is_global
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved)


@dataclass(frozen=True)
class FetchLimits:
    """An image takes at most `timeout_s` seconds; `at_once` are fetched at a time, and at most `queue` wait."""

    timeout_s: float = 10.0
    at_once: int = 8
    queue: int = 64


# Its own threads: a slow name server would otherwise hold up all else that the edge process does in threads.
_RESOLVING = ThreadPoolExecutor(FetchLimits.at_once, "resolve-image-hosts")


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError."""
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVING, resolve)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


class ImageFetcher:
    """Fetches from the hosts of the settings that it follows; from none at first.

    A URL is what a client sends: it must not reach into the node's own network. A host is resolved once, and the
    connection goes to the addresses that were checked. Redirects are not followed; no proxy, cookie or key is used.
    Errors and logs name the host, never the URL, which may carry a signature.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        resolve: Resolve = resolve_host,
        public: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._hosts: tuple[ImageHost, ...] = ()
        self._limits = limits or FetchLimits()
        self._resolve, self._public, self._tls = resolve, public, tls
        self._places = asyncio.Semaphore(self._limits.at_once)
        self._waiting = 0

    def follow(self, settings: NodeSettings) -> None:
        """Fetch from the hosts that these settings name."""
        self._hosts = tuple(ImageHost.parse(entry) for entry in settings.allow_image_hosts)

    async def fetch(self, url: str, where: str, most: int, deadline: float) -> bytes:
        """The content of an image file of at most `most` bytes; `where` is the field of the request that holds the URL.

        Raises BadRequest for a URL that is not allowed or does not lead to an image, PayloadTooLarge,
        DeadlineExceeded, Overloaded.
        """
        target, entry = self._allowed(url, where)
        if self._waiting >= self._limits.queue:
            raise Overloaded(f"{self._waiting} images wait to be fetched; the bound here is {self._limits.queue}")
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited for an image") from None
        finally:
            self._waiting -= 1
        host, limit, left = target.raw_host, self._limits.timeout_s, deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(left, limit)):
                return await self._get(target, entry, where, most)
        except TimeoutError:
            if left <= limit:
                raise DeadlineExceeded(f"the deadline passed while {where} was fetched", param=where) from None
            raise _refused(where, f"the image did not arrive from {host} within {limit:g} s") from None
        except ssl.SSLError as error:
            raise _refused(where, f"no secure connection to {host} ({_brief(error)})") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _refused(where, f"the image cannot be fetched from {host} ({_brief(error)})") from None
        finally:
            self._places.release()

    def _allowed(self, url: str, where: str) -> tuple[URL, ImageHost]:
        if not self._hosts:
            raise _refused(
                where,
                f"this node fetches no remote URLs ({SETTING} names no host); send the image itself, as "
                "data:image/png;base64,…",
            )
        try:
            if len(url) > _LONGEST_URL or _NOT_OF_A_URL.search(url):
                raise ValueError
            target = URL(url, encoded=url.isascii()).with_fragment(None)
            host, port = (target.raw_host or "").lower(), target.port
            if not host or port is None or target.scheme not in {"http", "https"} or "%" in host:
                raise ValueError
        except ValueError:
            raise _refused(where, f"not a URL of at most {_LONGEST_URL} characters") from None
        if target.raw_user is not None or target.raw_password is not None:
            raise _refused(where, "a URL may not hold a user name or a password")
        matching = [entry for entry in self._hosts if entry.covers(target.scheme, host.removesuffix("."), port)]
        if not matching:
            raise _refused(
                where, f"images are not fetched from {target.scheme}://{host}:{port}: {SETTING} does not name it"
            )
        return target, max(matching, key=lambda entry: entry.may_be_private)

    async def _addresses(self, target: URL, entry: ImageHost, where: str) -> Sequence[str]:
        """The addresses of the URL's host, if all of them are allowed. Raises BadRequest, OSError."""
        host = str(target.raw_host)
        addresses = await self._resolve(host, int(target.port or 0))
        if not addresses:
            raise OSError("it has no address")
        if not entry.may_be_private and not all(self._public(address) for address in addresses):
            raise _refused(
                where,
                f"{host} has an address that is not public; if images are meant to come from there, {SETTING} must "
                "name the host with its port",
            )
        return addresses

    async def _get(self, target: URL, entry: ImageHost, where: str, most: int) -> bytes:
        resolver = _Resolved(await self._addresses(target, entry, where))
        connector = aiohttp.TCPConnector(
            resolver=resolver, use_dns_cache=False, force_close=True, ssl=self._tls, socket_factory=_socket
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=False,
            ) as session,
            session.get(target, allow_redirects=False) as reply,
        ):
            _check_head(reply, str(target.raw_host), where, most)
            content = bytearray()
            async for chunk in reply.content.iter_chunked(_CHUNK):
                content += chunk
                if len(content) > most:
                    raise _too_large(where, most)
        if not content:
            raise _refused(where, "the image is empty")
        return bytes(content)


def _check_head(reply: aiohttp.ClientResponse, host: str, where: str, most: int) -> None:
    if 300 <= reply.status < 400:
        raise _refused(where, f"{host} answers with a redirect, which is not followed; send the URL that it leads to")
    if reply.status != 200:
        raise _refused(where, f"{host} answers with status {reply.status}")
    if (kind := reply.content_type.lower()) not in IMAGE_TYPES:
        raise _refused(where, f"images are {FORMATS}; {host} sends {kind:.80}")
    if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refused(where, f"{host} sends the image compressed once more, which was not asked for")
    if (reply.content_length or 0) > most:
        raise _too_large(where, most)


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose buffer bounds how much is parsed at once: framing without content (interim replies, chunks of a
    byte) would otherwise hold the event loop for seconds."""
    family, kind, protocol, _, _ = info
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return sock


class _Resolved(AbstractResolver):
    """Gives the addresses that were checked, whatever the name means by now."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        _ = family
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing is open."""


def _refused(where: str, reason: str) -> BadRequest:
    return BadRequest(f"{where}: {reason}", param=where)


def _too_large(where: str, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{where}: the image has more than {most} bytes, the bound here. Send a smaller one", param=where
    )


def _brief(error: BaseException) -> str:
    # Only the kind of error: the message of one may repeat the URL.
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error.strerror) if isinstance(error, socket.gaierror) else type(error).__name__


class RemoteImageMetrics:
    """Metrics of remote images, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "npu_node_remote_images",
            "Images that requests named by URL; the outcome is fetched or the code of the error",
            ("outcome",),
            registry=registry,
        )
        self.bytes = Counter("npu_node_remote_image_bytes", "Bytes of the images that were fetched", registry=registry)


def fetch_remote_images(node: Node) -> None:
    """Have the node fetch the remote images of requests, as its settings allow at the time."""
    images, fetcher = node.services.parts.of(image_decoder), ImageFetcher()
    metrics = node.telemetry.own(RemoteImageMetrics)

    async def fetch(url: str, where: str, most: int, deadline: float) -> bytes:
        try:
            content = await fetcher.fetch(url, where, most, deadline)
        except NodeError as error:
            metrics.images.labels(error.code).inc()
            raise
        metrics.images.labels("fetched").inc()
        metrics.bytes.inc(len(content))
        return content

    def follow(settings: NodeSettings) -> None:
        fetcher.follow(settings)
        images.most_fetched = settings.max_image_body_bytes

    images.fetch = fetch
    follow(node.settings)
    node.followers.append(follow)
