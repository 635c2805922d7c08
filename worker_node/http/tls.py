"""The node's own TLS: its certificate, the authority of its clients, and files that are renewed while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

from worker_node.core.errors import ConfigurationError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 10.0
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}


class ServerTls:
    """A TLS context that follows its files. Raises ConfigurationError for files that cannot be used.

    With `client_ca` only clients with a certificate of that authority are admitted. Open connections keep the
    certificate that they began with, and stay when their client's authority is withdrawn.
    """

    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._state()
        self._told = self._seen
        self._renewed = 0.0
        try:
            self._current = self._load()
            # A server keeps the context that it began with. It has each handshake done by the current one, since files
            # cannot be taken back from a context: a withdrawn authority would stay trusted.
            self.context = self._load()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"tls_cert, tls_key or tls_client_ca cannot be used: {_why(error)}") from None
        if problem := out_of_date(self._current, self._cert):
            log.error("the certificate in %s %s: clients that check it will refuse this node", self._cert, problem)
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
        told, self._told = self._told == state, state
        try:
            renewed = self._load()
            if problem := out_of_date(renewed, self._cert):
                if not told:
                    log.error("the renewed TLS files are not used: the certificate in %s %s", self._cert, problem)
                # Looked at again: the day may come, or the clock be set.
                return False
            self._seen = state
            self._current = renewed
            self._renewed = time.time()
        except (OSError, ValueError) as error:
            self._seen = state
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
            # A resumed session shows no certificate: it would outlive the authority.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        """Called in each handshake, whether or not the client names a host; returns an alert to refuse it."""
        # TLS 1.2 resumes without tickets, too. The times of sessions are whole seconds.
        session = connection.session if connection.session_reused else None
        if session is not None and session.time <= self._renewed:
            return ssl.ALERT_DESCRIPTION_BAD_CERTIFICATE
        connection.context = self._current
        return None

    def _state(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in (self._cert, self._key, self._client_ca)]


def out_of_date(server: ssl.SSLContext, cert: Path) -> str | None:
    """What is wrong with the dates of the certificate that the context shows, of that file; None if nothing is.

    Python reads no dates of a certificate that it does not verify, so a client that trusts it makes a handshake in
    memory.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    # The client has seen the certificate when it has read what the server answered.
    for side in (*sides, sides[0]):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _OUT_OF_DATE.get(error.verify_code)
    return None


def _no_password() -> str:
    raise ValueError("the key is encrypted: a node needs one without a password, in a file that only its user can read")


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found is not None else None


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not PEM, or the key is not the certificate's ({error.reason})"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) or "not PEM"
