"""The messages between client and node: requests, replies, errors. The only I/O is that of `transport`."""

from __future__ import annotations
