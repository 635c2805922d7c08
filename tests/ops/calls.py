"""Requests to what runs on a machine, and waiting for what it says."""

import contextlib
import json
import time
import urllib.error
import urllib.request

from tests.ops.containers import HANG_S


def call(url, key=None, body=None, kind="application/json"):
    """The status of the reply and its JSON; a body of bytes is sent as it is."""
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:  # noqa: S310
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def eventually(read, holds=bool):
    """Read until it holds, and return it. What does not listen yet does not hold; the limit is for a hang."""
    deadline, found = time.monotonic() + 2 * HANG_S, None
    while True:
        with contextlib.suppress(OSError):
            if holds(found := read()):
                return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def wait_until_ready(url, key):
    """Wait for a node or a gateway; returns what its /health says."""
    return eventually(lambda: call(f"{url}/health", key)[1], lambda body: body["status"] == "ready")
