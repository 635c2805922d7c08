"""Calls of the commands to a running node: over HTTP, by `NPU_NODE_URL`, with the node's own error messages."""

from __future__ import annotations

import argparse
import itertools
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import orjson

from worker_node.cli.output import printable
from worker_node.core.errors import ConfigurationError, NodeError
from worker_node.models.progress import Progress

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8081"
URL_VARIABLE = "NPU_NODE_URL"
KEY_VARIABLE = "NPU_NODE_API_KEY"
CA_VARIABLE = "NPU_NODE_CA_FILE"
CERT_VARIABLE = "NPU_NODE_CLIENT_CERT"
CLIENT_KEY_VARIABLE = "NPU_NODE_CLIENT_KEY"
# The value that keeps commands from looking for a node: they work on the store.
NO_NODE = "none"
# What to do about a certificate, by OpenSSL's code of its problem: another name, another address, expired.
_ANOTHER_NAME = f"set {URL_VARIABLE} to a name that it has"
_REMEDIES = {62: _ANOTHER_NAME, 64: _ANOTHER_NAME, 10: "renew it (tls_cert of the node)"}
_TRUST = f"name the authority that issued it with --ca-file FILE or {CA_VARIABLE}"
# A model may have to be loaded before the first byte; the node itself ends what takes too long.
_TIMEOUT = httpx2.Timeout(10.0, connect=2.0, read=None)
_READING = httpx2.Timeout(10.0, connect=2.0)


class NodeCallFailed(NodeError):
    """A node answered a call with an error, or the connection to it broke; `http_status` 0 then."""

    def __init__(self, message: str, http_status: int = 0) -> None:
        super().__init__(message)
        self.http_status = http_status


class NodeClient:
    """Calls to one node. Every call raises NodeCallFailed when it fails."""

    def __init__(self, url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        verify = True if tls is None else tls
        # The environment's proxy is for the internet, not for one's own node.
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False, verify=verify)

    def close(self) -> None:
        self._http.close()

    def live_status(self) -> int:
        """The status of a probe, 200 of a node; 0: no answer. Raises NodeCallFailed: wrong scheme or certificate."""
        try:
            return self._http.get("/health/live", timeout=2.0).status_code
        except httpx2.HTTPError as error:
            if (problem := _tls_problem(self.url, error)) is not None:
                raise NodeCallFailed(problem) from error
            return 0

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = _READING if method == "GET" else _TIMEOUT
        with self._stream(method, path, body, timeout) as response:
            answer = orjson.loads(response.read())
            if not isinstance(answer, dict):
                raise self.no_node()
            return answer

    def models(self) -> list[dict[str, Any]]:
        """The models that the node can use, each with its id and its state at least."""
        return [self._checked(model) for model in self.call("GET", "/models")["models"]]

    def model(self, name: str) -> dict[str, Any]:
        return self._checked(self.call("GET", model_path(name)))

    def _checked(self, model: Any) -> dict[str, Any]:
        if not isinstance(model, dict) or not {"id", "state"} <= model.keys():
            raise self.no_node()
        return model

    @contextmanager
    def lines(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The JSON lines of a streamed POST; leaving the block early cancels the request."""
        with self._stream("POST", path, body, _TIMEOUT) as response:

            def read() -> Iterator[dict[str, Any]]:
                # `iter_lines` would also end lines at characters within the JSON, such as U+2028.
                rest = b""
                for piece in itertools.chain(response.iter_bytes(), [b"\n"]):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, lines):
                        decoded = orjson.loads(line)
                        if isinstance(decoded, dict) and "error" in decoded:
                            raise NodeCallFailed(str(decoded["error"]), response.status_code)
                        yield decoded

            yield read()

    def pull(self, name: str, progress: Progress) -> None:
        stage: str | None = None
        with self.lines("/api/pull", {"model": name}) as lines:
            for line in lines:
                if line["status"] != stage:
                    stage = line["status"]
                    progress.stage(stage, line.get("total"))
                if line.get("completed"):
                    progress.update(line["completed"])

    @contextmanager
    def _stream(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx2.Timeout
    ) -> Iterator[httpx2.Response]:
        try:
            with self._http.stream(method, path, json=body, timeout=timeout) as response:
                if response.status_code >= 300:
                    raise self._refused(response.status_code, response.read())
                yield response
        except httpx2.HTTPError as error:
            problem = _tls_problem(self.url, error) if isinstance(error, httpx2.ConnectError) else None
            raise NodeCallFailed(problem or f"the connection to the node at {self.url} failed: {error}") from error
        except orjson.JSONDecodeError as error:
            raise self.no_node() from error
        except UnicodeEncodeError as error:
            # Bytes of the command line or of standard input that the locale's encoding does not have.
            encoding = (sys.stdin.encoding or "UTF-8").upper()
            raise NodeCallFailed(f"the text is not valid {encoding}: check it, and the locale (LC_ALL)") from error

    def _refused(self, status: int, content: bytes) -> NodeCallFailed:
        try:
            error = orjson.loads(content)["error"]
            message = printable(str(error["message"] if isinstance(error, dict) else error))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return self.not_alive(status)
        return NodeCallFailed(message + (f" (set {KEY_VARIABLE})" if status == 401 else ""), status)

    def not_alive(self, status: int) -> NodeCallFailed:
        """The error for a status that a proxy or another server answers with, not a node."""
        remedy = f"check {URL_VARIABLE}, and the proxy if one stands before the node"
        if 300 <= status < 400:
            remedy = f"set {URL_VARIABLE} to the address that it redirects to"
        elif status in {401, 403}:
            remedy = f"set {KEY_VARIABLE} to a key that it takes, or {URL_VARIABLE} to the node itself"
        elif self.url.endswith("/v1"):
            remedy = f"leave out /v1 in {URL_VARIABLE}"
        return NodeCallFailed(f"{self.url} answered {status}, not as a node does: {remedy}", status)

    def no_node(self) -> NodeCallFailed:
        return NodeCallFailed(f"{self.url} answered, but not as a node does: check {URL_VARIABLE}")


def model_path(name: str, action: str = "") -> str:
    """The route of a model, or of what is done to it; ids may hold slashes. Raises ConfigurationError for no name."""
    undecoded = any("\ud800" <= character <= "\udfff" for character in name)
    if undecoded or any(part in {"", ".", ".."} for part in name.split("/")):
        # HTTP clients and servers would make another route of it, and with it another model.
        raise ConfigurationError(f"{name!r} is not the name of a model; list the names with: npu-node list")
    return f"/models/{quote(name, safe='/:@')}" + (f"/{action}" if action else "")


def _tls_problem(url: str, error: httpx2.HTTPError) -> str | None:
    """What is wrong with the scheme of the URL or with a certificate, and what to do; None where it is neither."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    scheme, _, host = url.partition("://")

    if isinstance(cause, ssl.SSLCertVerificationError):
        remedy = _REMEDIES.get(cause.verify_code, _TRUST)
        return f"the certificate of {url} is not trusted ({cause.verify_message.rstrip('.')}): {remedy}"
    if isinstance(cause, ssl.SSLError) and cause.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}:
        return f"{url} answers, but not with https: set {URL_VARIABLE} to http://{host}"

    if cause is None and not isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return None
    if scheme.lower() == "https":
        # A server that misses or rejects a client's certificate ends the connection, most of them without a word.
        return (
            f"{url} ended the connection after the TLS handshake: if it asks for a client certificate (tls_client_ca), "
            f"give one that it trusts with --client-cert and --client-key, or {CERT_VARIABLE} and {CLIENT_KEY_VARIABLE}"
        )
    return f"{url} ends the connection unanswered: if it serves https, set {URL_VARIABLE} to https://{host}"


def _tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """The context of the options and the environment; None where neither names a file. Raises ConfigurationError."""
    given = {
        f"--ca-file ({CA_VARIABLE})": args.ca_file or os.environ.get(CA_VARIABLE),
        f"--client-cert ({CERT_VARIABLE})": args.client_cert or os.environ.get(CERT_VARIABLE),
        f"--client-key ({CLIENT_KEY_VARIABLE})": args.client_key or os.environ.get(CLIENT_KEY_VARIABLE),
    }
    if not any(given.values()):
        return None

    for name, file in given.items():
        try:
            Path(file or os.devnull).open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{name}: {file} cannot be read: {error.strerror}") from None

    (ca_name, cert_name, key_name), (ca_file, cert, key) = given, given.values()
    if key and not cert:
        raise ConfigurationError(f"{key_name} is set without {cert_name}: set both")
    problem = f"{ca_name} must be a PEM file of certificates, got {ca_file}"
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert:
            problem = f"{cert_name} and {key_name} must be PEM files, and a pair"
            context.load_cert_chain(cert, key or None)
    except (OSError, ValueError):
        raise ConfigurationError(problem) from None
    return context


@contextmanager
def node_or_none(args: argparse.Namespace) -> Iterator[NodeClient | None]:
    """The node of `NPU_NODE_URL`, else the local one if it runs, until the block ends; the key is `NPU_NODE_API_KEY`.

    Raises ConfigurationError when the variable names a node that does not answer, or a variable is malformed, and
    NodeCallFailed if an answer lacks what the block reads in it.
    """
    url = os.environ.get(URL_VARIABLE, "")
    if url.lower() == NO_NODE:
        yield None
        return
    with closing(_client(args, url)) as client:
        if (status := client.live_status()) == 200:
            try:
                yield client
            except (LookupError, TypeError, AttributeError) as error:
                raise client.no_node() from error
            return

    if url and status:
        raise client.not_alive(status)
    if url:
        raise ConfigurationError(f"no node answers at {url} ({URL_VARIABLE}); start it, or unset the variable")
    yield None


def _client(args: argparse.Namespace, url: str) -> NodeClient:
    try:
        address = httpx2.URL(url or DEFAULT_URL)
    except httpx2.InvalidURL as error:
        raise ConfigurationError(f"{URL_VARIABLE}: {url!r} is not a URL ({error})") from error
    if address.userinfo:
        raise ConfigurationError(f"{URL_VARIABLE} must have no user and password: the key is {KEY_VARIABLE}")
    if address.scheme not in {"http", "https"} or not address.host:
        raise ConfigurationError(f"{URL_VARIABLE}: {url!r} is not a URL such as {DEFAULT_URL}")

    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            f"{KEY_VARIABLE} has a line break or another character that cannot be in a header: set it to one key"
        )
    return NodeClient(url or DEFAULT_URL, key, _tls_context(args))


def where_no_node_runs() -> str:
    if os.environ.get(URL_VARIABLE, "").lower() == NO_NODE:
        return f"no node is asked ({URL_VARIABLE} is {NO_NODE})"
    return f"no node runs at {DEFAULT_URL} ({URL_VARIABLE} names another)"


def on_node(
    args: argparse.Namespace, work: Callable[[NodeClient], T], otherwise: Callable[[], T], *, changes: bool = False
) -> T:
    """The result of `work` with the running node, or of `otherwise` when none runs.

    A command that `changes` something leaves a node alone that nobody named if a store was named: it may use another.
    """
    from worker_node.models.store import STORE_VARIABLE

    store = getattr(args, "model_store", None) or (os.environ.get(STORE_VARIABLE) and not os.environ.get(URL_VARIABLE))
    if changes and store:
        return otherwise()
    with node_or_none(args) as node:
        return otherwise() if node is None else work(node)
