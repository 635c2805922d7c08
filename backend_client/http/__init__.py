"""The messages between client and node: requests, replies, errors. The only I/O is that of `transport`.

It may import the plain modules (`errors`, `results`, `options`, `lifetime`). Begin with `messages`, then
`answers` and `stream_forms`, which check every reply, whole and streamed, and `transport`: all requests to nodes.
"""

from __future__ import annotations
