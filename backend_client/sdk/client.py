"""OpenAI's clients with a transport over the fleet, for the HTTP library that the installed SDK is built on.

That is httpx2 from version 3 of the SDK on, httpx before.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI, OpenAIError

from backend_client.calls import BaseClient
from backend_client.errors import DeadlineExceeded
from backend_client.lifetime import LoopIterator, LoopThread
from backend_client.sdk.routes import OpenAIRoutes

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    # The SDK takes clients and transports of its own library alone.
    httpx = importlib.import_module(DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])

__all__ = ["httpx"]

BASE_URL = "http://fleet.invalid/v1"


class FleetTransport(httpx.AsyncBaseTransport):
    """Carries the requests of an `httpx.AsyncClient` over a client. Closing it closes the client."""

    def __init__(self, client: BaseClient) -> None:
        self._client = client
        self._routes = OpenAIRoutes(client)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _as_sdk_error(request):
            reply = await self._routes.handle(*_parts(request), await request.aread(), _seconds(request))
        # A stream in any case: callers of `with_streaming_response` read the body themselves.
        content = reply.content
        stream = httpx.ByteStream(content) if isinstance(content, bytes) else _AsyncStream(content, request)
        return httpx.Response(reply.status, headers=reply.headers, stream=stream)

    async def aclose(self) -> None:
        await self._client.close()


class BlockingFleetTransport(httpx.BaseTransport):
    """The same for an `httpx.Client`; the client lives in the event loop of a thread of its own."""

    def __init__(self, client: BaseClient) -> None:
        self._routes = OpenAIRoutes(client)
        self._thread = LoopThread("openai over the fleet", client.close)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _as_sdk_error(request):
            reply = self._thread.run(self._routes.handle(*_parts(request), request.read(), _seconds(request)))
        content = reply.content
        stream = (
            httpx.ByteStream(content) if isinstance(content, bytes) else _BlockingStream(self._thread, content, request)
        )
        return httpx.Response(reply.status, headers=reply.headers, stream=stream)

    def close(self) -> None:
        self._thread.close()


@contextmanager
def _as_sdk_error(request: httpx.Request) -> Iterator[None]:
    """Callers of the SDK catch OpenAIError: it passes on what is not an error of its HTTP library."""
    try:
        yield
    except (httpx.HTTPError, OpenAIError):
        raise
    except DeadlineExceeded as error:
        # The SDK makes an APITimeoutError of it.
        raise httpx.ReadTimeout(error.message, request=request) from error
    except Exception as error:
        raise APIConnectionError(message=str(error), request=request) from error


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, content: AsyncGenerator[bytes, None], request: httpx.Request) -> None:
        self._content = content
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_sdk_error(self._request):
            async for part in self._content:
                yield part

    async def aclose(self) -> None:
        await self._content.aclose()


class _BlockingStream(httpx.SyncByteStream):
    def __init__(self, thread: LoopThread, content: AsyncGenerator[bytes, None], request: httpx.Request) -> None:
        self._parts = LoopIterator(thread, content)
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        with _as_sdk_error(self._request):
            yield from self._parts

    def close(self) -> None:
        self._parts.close()


def openai_over(client: BaseClient) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=FleetTransport(client), base_url=BASE_URL)
    seconds = client.core.options.timeouts.generate
    return AsyncOpenAI(api_key="unused", base_url=BASE_URL, http_client=http, max_retries=0, timeout=seconds)


def blocking_openai_over(client: BaseClient) -> OpenAI:
    http = httpx.Client(transport=BlockingFleetTransport(client), base_url=BASE_URL)
    seconds = client.core.options.timeouts.generate
    return OpenAI(api_key="unused", base_url=BASE_URL, http_client=http, max_retries=0, timeout=seconds)


def _parts(request: httpx.Request) -> tuple[str, str, dict[str, str]]:
    path = request.url.path
    return request.method, path if path.startswith(("/v1/", "/v2/")) else path.rstrip("/"), dict(request.headers)


def _seconds(request: httpx.Request) -> float | None:
    timeout = request.extensions.get("timeout") or {}
    found = timeout.get("read")
    return float(found) if isinstance(found, int | float) else None
