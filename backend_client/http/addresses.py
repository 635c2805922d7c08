"""Where nodes are: URLs, names in DNS, or a file. Parsing only; `backend_client.fleet.discovery` looks them up.

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
from collections.abc import Iterable
from dataclasses import dataclass

from yarl import URL

from backend_client.errors import INSTALL_EXTRA

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
