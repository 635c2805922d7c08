"""Authentication between client and nodes: API keys, certificates, and the proxy to reach the nodes by."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.http.addresses import node_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`node_keys` are keys of single nodes by URL; all others get `key`; "" is none.

    `tls` None: the system's authorities. `proxy` is used for nodes only if it is given: proxies of the environment are for the cloud.
    """

    key: str = field(default="", repr=False)
    node_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None
    proxy: str | None = field(default=None, repr=False)


def sendable_key(key: str) -> str:
    """`key`, if it can be sent in a header. Raises ValueError, which does not repeat it."""
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError("an API key holds no white space and ASCII only; is there a line end in its file?")
    return key


def proxy_url(proxy: str | None) -> str | None:
    """`proxy`, if it is the URL of one. Raises ConfigurationError, which does not repeat it: it may hold a password."""
    if proxy is None:
        return None
    try:
        url = URL(proxy)
    except (TypeError, ValueError):
        url = URL()
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigurationError("proxy is given as http://host:port")
    return proxy


def keys_by_node(keys: Mapping[str, str] | None) -> dict[str, str]:
    """The keys by the nodes' URLs in their one form. Raises ConfigurationError, which repeats no key."""
    if keys is not None and not (
        isinstance(keys, Mapping) and all(isinstance(part, str) for item in keys.items() for part in item)
    ):
        raise ConfigurationError("node_keys maps URLs of nodes to API keys")
    try:
        return {node_url(url): sendable_key(key) for url, key in (keys or {}).items()}
    except ValueError as error:
        problem = str(error)
    raise ConfigurationError(f"node_keys: {problem}")


def tls_context(
    context: ssl.SSLContext | None, ca_file: Path | str | None, cert: Path | str | None, key: Path | str | None
) -> ssl.SSLContext | None:
    """The TLS context for nodes; None when nothing is given. Raises ConfigurationError.

    `ca_file` replaces the system's authorities. `cert` and `key` are the client's certificate (PEM), for nodes with
    `tls_client_ca`.
    """
    if context is not None:
        if ca_file or cert or key:
            raise ConfigurationError("give either ssl_context, or ca_file, client_cert and client_key")
        if not isinstance(context, ssl.SSLContext):
            raise ConfigurationError("ssl_context is an ssl.SSLContext")
        return context
    if not (ca_file or cert or key):
        return None
    if not all(value is None or isinstance(value, str | Path) for value in (ca_file, cert, key)):
        raise ConfigurationError("ca_file, client_cert and client_key are paths")
    if key and not cert:
        raise ConfigurationError("client_key is given without client_cert")
    given, demand = f"ca_file {ca_file}", "must be a PEM file of certificates"
    try:
        made = ssl.create_default_context(cafile=ca_file)
        if cert:
            given, demand = "client_cert and client_key", "must be PEM files, and a pair"
            made.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
        problem = f"{given} cannot be read: {why}" if why else f"{given} {demand}"
    else:
        return made
    raise ConfigurationError(problem)
