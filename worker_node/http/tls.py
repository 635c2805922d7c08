"""The node's own TLS: its certificate, the authority of its clients, and files that are renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from worker_node.core.errors import ConfigurationError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 10.0


class ServerTls:
    """A TLS context that follows its files. Raises ConfigurationError for files that cannot be used.

    With `client_ca` only clients with a certificate of that authority are admitted, by TLS 1.3. Open connections keep
    the certificate that they began with, and stay when their client's authority is withdrawn.
    """

    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._state()
        try:
            self._current = self._load()
            # A server keeps the context that it began with. It has each handshake done by the current one, since files
            # cannot be taken back from a context: a withdrawn authority would stay trusted.
            self.context = self._load()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"tls_cert, tls_key or tls_client_ca cannot be used: {_why(error)}") from None
        self.context.sni_callback = self._use_current

    async def follow(self) -> None:
        """Check the files every 10 s until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> bool:
        """Use renewed files for new connections. Returns whether they were; broken ones are logged and not used."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self._current = self._load()
        except (OSError, ValueError) as error:
            log.error("the renewed TLS files are not used: %s", _why(error))
            return False
        log.info("TLS files were renewed; new connections use them")
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Without an answer of ours OpenSSL would ask on the terminal, and the node would stand still until then.
        context.load_cert_chain(self._cert, self._key, password=_no_password)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session shows no certificate: it would outlive the authority. TLS 1.3 resumes by tickets only.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, whether or not the client names a host."""
        connection.context = self._current

    def _state(self) -> list[tuple[int, int] | None]:
        """Time and size of each file; None where there is none."""
        state: list[tuple[int, int] | None] = []
        for path in (self._cert, self._key, self._client_ca):
            try:
                found = path.stat() if path is not None else None
            except OSError:
                found = None
            state.append(found and (found.st_mtime_ns, found.st_size))
        return state


def _no_password() -> str:
    raise ValueError("the key is encrypted: a node needs one without a password, in a file that only its user can read")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not PEM, or the key is not the certificate's ({error.reason})"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) or "not PEM"
