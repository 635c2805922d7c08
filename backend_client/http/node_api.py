"""The requests that the client sends to nodes, over any transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from pydantic import ValidationError

from backend_client.errors import BadReply, NPUError
from backend_client.http import messages
from backend_client.http.answers import read_json
from backend_client.http.errors import status_error
from backend_client.http.health import HealthReport
from backend_client.http.messages import EmbedReply, Reply, WireCall, new_request_id
from backend_client.http.sse import Event

BINARY = "application/octet-stream"
REQUEST_ID = "X-Request-ID"


class Transport(Protocol):
    """What the client needs of the network; tests replace it with a function or two.

    Every method raises NodeError when the attempt failed and RequestRejected when the request was refused. Time limits
    are the caller's: it cancels.
    """

    async def health(self, node: str) -> HealthReport:
        """The node's report, also when it reports that it does not serve."""
        ...

    async def embed(self, node: str, call: WireCall) -> EmbedReply:
        """POST /embeddings."""
        ...

    async def exchange(self, node: str, call: WireCall) -> Reply:
        """A request to `call.path`; the reply of any status."""
        ...

    def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """The same as a stream: the head of the reply, then its events."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...


class NodeApi(ABC):
    """The transport, given how one request is carried: `request`, `events` and `close`."""

    @abstractmethod
    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> tuple[int, Mapping[str, str], bytes | bytearray]:
        """Send a request; returns the status, headers (their names in any case) and body of its reply.

        Of raw numbers (`BINARY`) the body may be memory that can be written.

        A `probe` never waits for requests. Raises NodeError.
        """

    @abstractmethod
    def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """POST to `call.path` and follow the stream: the reply's head, then its events.

        The head of a reply that is JSON instead has a body. `call.refused` is the reply of another status than 200,
        which raises its error.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all connections."""

    async def health(self, node: str) -> HealthReport:
        """GET /health; 503 is an answer too, of a node that does not serve now."""
        status, _, body = await self.request(node, "GET", "/health", None, {REQUEST_ID: new_request_id()}, probe=True)
        data = messages.read_from(node, read_json, bytes(body))
        try:
            return HealthReport.model_validate(data)
        except ValidationError:
            pass
        raise BadReply(f"/health answered HTTP {status}, but not as a node does", node=node, status=status)

    async def embed(self, node: str, call: WireCall) -> EmbedReply:
        """POST /embeddings, with the vectors as raw float32."""
        status, headers, body = await self.request(node, "POST", "/embeddings", call.encoded, call.headers(BINARY))
        if status != 200:
            raise self.refusal(node, status, headers, bytes(body), call)
        return messages.embed_reply(node, headers, body, len(call.texts))

    async def exchange(self, node: str, call: WireCall) -> Reply:
        """Send a request to `call.path`; returns the reply, whatever its status."""
        status, headers, body = await self.request(
            node, call.method, call.path, call.encoded or None, call.headers("*/*")
        )
        return Reply(status, {name.lower(): value for name, value in headers.items()}, bytes(body), self.has_key(node))

    def has_key(self, node: str) -> bool | None:  # noqa: ARG002  (for those that know)
        """Whether requests to a node carry an API key; None where that is not known."""
        return None

    def refusal(self, node: str, status: int, headers: Mapping[str, str], body: bytes, call: WireCall) -> NPUError:
        """The error that a reply of another status than 200 means."""
        return status_error(node, status, headers, body, call.model, keyed=self.has_key(node))
