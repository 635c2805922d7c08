"""Limits on connections: how long they may be idle, and how many may be open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, and how many connections may be open.

    At the limit, a request whose body is still to come keeps its connection for `send_grace_s` only. A client who sends
    on after the last reply is listened to for `linger_s`.
    """

    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    stall_timeout_s: float = 30.0
    send_grace_s: float = 0.25
    linger_s: float = 2.0
