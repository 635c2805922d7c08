"""The image's HEALTHCHECK: exit status 0 if the node of this container can serve.

It asks /health/ready at NPU_NODE_HOST and NPU_NODE_PORT, by http or https. A node with `tls_client_ca` answers only
callers with a certificate: NPU_CLIENT_CLIENT_CERT and NPU_CLIENT_CLIENT_KEY name the files of one. Without one, or if
the node refuses it, a node that completes the TLS handshake counts as healthy. Certificates are not verified: the
connection does not leave the container. Needs only the standard library, since it is started every 15 s.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

# Below the limit of HEALTHCHECK, which kills the program without a word.
_TIMEOUT_S = 4.0
_EVERY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (compared, not bound)


def main() -> int:
    """Print why the node is unhealthy, and return the exit status."""
    bound = os.environ.get("NPU_NODE_HOST", "")
    host, port = _EVERY_ADDRESS.get(bound, bound), int(os.environ.get("NPU_NODE_PORT") or 8081)
    # The settings file may have the certificate, too: the other scheme is tried when the likelier one fails.
    tried = [_https, _http] if os.environ.get("NPU_NODE_TLS_CERT") else [_http, _https]
    problems = []
    for ask in tried:
        try:
            problem = ask(host, port)
        except (ConnectionRefusedError, TimeoutError) as error:
            problems = [f"no answer at {host}:{port}: {error}"]
            break
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"{ask.__name__[1:]}: {error!r}")
        else:
            problems = [problem] if problem else []
            break
    print("; ".join(problems) or "healthy")
    return 1 if problems else 0


def _http(host: str, port: int) -> str | None:
    """What is wrong, None if nothing is. Raises OSError and HTTPException where no http is spoken."""
    return _ready(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S))


def _https(host: str, port: int) -> str | None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    if cert := os.environ.get("NPU_CLIENT_CLIENT_CERT"):
        # A key with a password is not usable; without one here, OpenSSL would ask for it.
        tls.load_cert_chain(cert, os.environ.get("NPU_CLIENT_CLIENT_KEY"), password="")
    connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=tls)
    connection.connect()
    try:
        return _ready(connection)
    except (ssl.SSLError, ConnectionError):
        # With TLS 1.3 the handshake ends before the node has seen the caller's certificate.
        return None


def _ready(connection: http.client.HTTPConnection) -> str | None:
    try:
        connection.request("GET", "/health/ready")
        reply = connection.getresponse()
        text = reply.read(200).decode(errors="replace")
    finally:
        connection.close()
    return None if reply.status == 200 else f"status {reply.status}: {text}"


if __name__ == "__main__":
    sys.exit(main())
