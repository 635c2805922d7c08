"""Checks whether a request carries one of the node's API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web


class ApiKeys:
    """The node's keys, as digests; without any, every request is authorized."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: list[bytes] = []
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace the keys, from the next request on."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def authorize(self, request: web.Request) -> bool:
        """Whether the request may do what key holders may. Compared in constant time, by digest."""
        if not self._digests:
            return True
        scheme = request.headers.get("Authorization", "").partition(" ")[0]
        digest = _given(request)
        # All are compared, so that the time tells neither which key matched nor whether one did.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    def owner(self, request: web.Request) -> bytes:
        """The owner of a request: equal for all requests with one key, different for each key. Only for authorized
        ones.
        """
        return _given(request) if self._digests else b""


def _given(request: web.Request) -> bytes:
    """The digest of the key that a request carries."""
    _, _, given = request.headers.get("Authorization", "").partition(" ")
    return hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()


API_KEYS = web.AppKey("api_keys", ApiKeys)
