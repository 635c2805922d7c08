"""The messages between client and node: requests, replies, errors. The only I/O is that of `transport`.

It may import the plain modules (`errors`, `results`, `options`, `lifetime`). Begin with `messages` and `routes`;
`replies` reads every reply, by the checks of `answers` and `stream_forms`, and `transport` carries all requests.
"""

from __future__ import annotations
