"""The messages between client and node: requests, replies, errors. The only I/O is that of `transport`.

It may import the plain modules (`errors`, `results`, `options`, `deadline`, `lifetime`). Begin with `messages`, then
`answers`, which checks every reply, and `node_api`: all requests to nodes, over any transport.
"""

from __future__ import annotations
