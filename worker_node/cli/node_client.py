"""Calls of the commands to a running node: over HTTP, by `NPU_NODE_URL`, with the node's own error messages."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import orjson

from worker_node.core.errors import ConfigurationError, NodeError
from worker_node.core.types import Progress

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8081"
URL_VARIABLE = "NPU_NODE_URL"
KEY_VARIABLE = "NPU_NODE_API_KEY"
# The value that keeps commands from looking for a node: they work on the store.
NO_NODE = "none"
_URL = re.compile("https?://[^/:]", re.IGNORECASE)
# A model may have to be loaded before the first byte; the node itself ends what takes too long.
_TIMEOUT = httpx2.Timeout(10.0, connect=2.0, read=None)


class NodeCallFailed(NodeError):
    """A node answered a call with an error, or the connection to it broke; `http_status` 0 then."""

    def __init__(self, message: str, http_status: int = 0) -> None:
        super().__init__(message)
        self.http_status = http_status


class NodeClient:
    """Calls to one node. Every call raises NodeCallFailed when it fails."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The environment's proxy is for the internet, not for one's own node.
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_up(self) -> bool:
        """Whether a node answers at the address."""
        try:
            return self._http.get("/health/live", timeout=2.0).status_code == 200
        except httpx2.HTTPError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        """The JSON of a GET."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON of a POST."""
        return self._call("POST", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        """The JSON of a DELETE."""
        return self._call("DELETE", path, None)

    @contextmanager
    def lines(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The JSON lines of a streamed POST; leaving the block early cancels the request."""
        with self._explained(), self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                response.read()
                raise _refused(response)
            yield self._decoded(response)

    def pull(self, name: str, progress: Progress) -> None:
        """Have the node pull a model, and show how far it is."""
        stage: str | None = None
        with self.lines("/api/pull", {"model": name}) as lines:
            for line in lines:
                if line["status"] != stage:
                    stage = line["status"]
                    progress.stage(stage, line.get("total"))
                if line.get("completed"):
                    progress.update(line["completed"])

    def _decoded(self, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if not line:
                continue
            decoded = orjson.loads(line)
            if isinstance(decoded, dict) and "error" in decoded:
                raise NodeCallFailed(str(decoded["error"]), response.status_code)
            yield decoded

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._explained():
            response = self._http.request(method, path, json=body)
            if response.status_code >= 400:
                raise _refused(response)
            answer = orjson.loads(response.content)
        if not isinstance(answer, dict):
            raise self.no_node()
        return answer

    def no_node(self) -> NodeCallFailed:
        """The error for an answer that is not a node's."""
        return NodeCallFailed(f"{self.url} answered, but not as a node does: check {URL_VARIABLE}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx2.HTTPError as error:
            raise NodeCallFailed(f"the connection to the node at {self.url} failed: {error}") from error
        except orjson.JSONDecodeError as error:
            raise self.no_node() from error
        except UnicodeEncodeError as error:
            # Bytes of the command line or of standard input that the locale's encoding does not have.
            raise NodeCallFailed(f"the text is not valid {_encoding()}: check it, and the locale (LC_ALL)") from error


def model_path(name: str, action: str = "") -> str:
    """The route of a model, or of what is done to it; ids may hold slashes. Raises ConfigurationError for no name."""
    undecoded = any("\ud800" <= character <= "\udfff" for character in name)
    if undecoded or any(part in {"", ".", ".."} for part in name.split("/")):
        # HTTP clients and servers would make another route of it, and with it another model.
        raise ConfigurationError(f"{name!r} is not the name of a model; list the names with: npu-node list")
    return f"/models/{quote(name, safe='/:@')}" + (f"/{action}" if action else "")


def find_node() -> NodeClient | None:
    """The node of `NPU_NODE_URL`, else the local one if it runs; the key is `NPU_NODE_API_KEY`.

    Raises ConfigurationError when the variable names a node that does not answer, or a variable is malformed.
    """
    url = os.environ.get(URL_VARIABLE, "")
    if url.lower() == NO_NODE:
        return None
    if url and not _URL.match(url):
        raise ConfigurationError(f"{URL_VARIABLE}: {url!r} is not a URL such as {DEFAULT_URL}")
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            f"{KEY_VARIABLE} has a line break or another character that cannot be in a header: set it to one key"
        )
    try:
        client = NodeClient(url or DEFAULT_URL, key)
    except httpx2.InvalidURL as error:
        raise ConfigurationError(f"{URL_VARIABLE}: {url!r} is not a URL ({error})") from error
    if client.is_up():
        return client
    client.close()
    if url:
        raise ConfigurationError(f"no node answers at {url} ({URL_VARIABLE}); start it, or unset the variable")
    return None


@contextmanager
def node_or_none() -> Iterator[NodeClient | None]:
    """As `find_node`, closed after the block. NodeCallFailed if an answer lacks what the block reads in it."""
    client = find_node()
    try:
        yield client
    except (LookupError, TypeError, AttributeError) as error:
        if client is None:
            raise
        raise client.no_node() from error
    finally:
        if client is not None:
            client.close()


def where_no_node_runs() -> str:
    """For a message: where no node was found."""
    if os.environ.get(URL_VARIABLE, "").lower() == NO_NODE:
        return f"no node is asked ({URL_VARIABLE} is {NO_NODE})"
    return f"no node runs at {DEFAULT_URL} ({URL_VARIABLE} names another)"


def on_node(work: Callable[[NodeClient], T], otherwise: Callable[[], T]) -> T:
    """The result of `work` with the running node, or of `otherwise` when none runs."""
    with node_or_none() as node:
        return otherwise() if node is None else work(node)


def _encoding() -> str:
    return (sys.stdin.encoding or "UTF-8").upper()


def _refused(response: httpx2.Response) -> NodeCallFailed:
    try:
        error = orjson.loads(response.content)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = f"the node answered {response.status_code}"
    if response.status_code == 401:
        message += f" (set {KEY_VARIABLE})"
    return NodeCallFailed(message, response.status_code)
