"""Where nodes are: URLs, names in DNS, or a file. Parsing only; `backend_client.fleet.runtime` looks them up.

| given as | means |
|---|---|
| `http://10.0.0.22:8081`, `10.0.0.22:8081` | this node |
| `dns://npu.internal:8081` | every address of the name (A, or AAAA where there are more), by the system's resolver |
| `srv://_npu._tcp.internal`, `srv+https://…` | host and port of every SRV record; needs the extra `dns` |
| `file:///etc/npu/nodes` | a URL a line, `#` begins a comment; read again when it changes |

`dns` has no https: a certificate is for a name, not for an address."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from backend_client.errors import INSTALL_EXTRA, ConfigurationError

_FORMS = "a node is given as host:port, http://host:port or https://host:port, such as 10.0.0.22:8081"
_SOURCES = frozenset({"dns", "srv", "srv+https", "file"})


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """An address of a list of nodes: `scheme` is dns, srv, srv+https or file."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path or self.host}" + (f":{self.port}" if self.port else "")


def node_url(value: str) -> str:
    """A node's URL in its one form, without a slash at the end; `host:port` alone means http.

    An IPv4 address that is written as one of IPv6 (::ffff:10.0.0.22) is the IPv4 address.

    Raises ValueError, which repeats no user or password.
    """
    value = value.strip()
    try:
        url = URL(value if "://" in value else f"http://{value}")
        host, port = url.host, url.explicit_port
    except ValueError:
        raise ValueError(_FORMS) from None
    if url.scheme not in {"http", "https"} or not host or " " in value or url.query_string or url.fragment:
        raise ValueError(_FORMS)
    if "://" not in value and port is None:
        raise ValueError(f"the port is missing: {_FORMS}")
    if url.user or url.password:
        raise ValueError("a node's URL holds no user or password: URLs are logged; use api_key")
    with contextlib.suppress(ValueError):
        mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
        url = url.with_host(str(mapped)) if mapped else url
    made = str(url).rstrip("/")
    if made.endswith("/v1"):
        raise ValueError(f"{made} is the base_url of an OpenAI client; a node is given as {made.removesuffix('/v1')}")
    return made


def parse_nodes(values: Iterable[str]) -> tuple[list[str], list[NodeAddress]]:
    """Node URLs, and the addresses of lists of nodes. Raises ValueError for what is neither."""
    urls: list[str] = []
    lists: list[NodeAddress] = []
    for value in values:
        scheme = value.strip().partition("://")[0]
        if scheme in _SOURCES:
            lists.append(_list_address(scheme, URL(value.strip())))
        else:
            urls.append(node_url(value))
    return list(dict.fromkeys(urls)), lists


def _list_address(scheme: str, url: URL) -> NodeAddress:
    if scheme == "file":
        return NodeAddress(scheme, path=url.path)
    if not url.host:
        raise ValueError(f"{scheme}:// names no host")
    if scheme == "dns":
        if url.explicit_port is None:
            raise ValueError("a name in DNS is given with its port: dns://name:8081")
        return NodeAddress(scheme, url.host, url.explicit_port)
    if importlib.util.find_spec("dns") is None:
        raise ValueError(f"SRV records need dnspython: {INSTALL_EXTRA.format('dns')}")
    return NodeAddress(scheme, url.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`node_keys` are keys of single nodes by URL; all others get `key`; "" is none.

    `tls` None: the system's authorities. `proxy` is used for nodes only if it is given: proxies of the environment are
    for the cloud.
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
