"""Which node gets a request: what is known of each node and model, and what each outcome teaches.

It may import `http`, `settings` and the plain modules, and knows no call, no retry and no cloud. Pure, the clock
injected, but for `runtime`. Begin with `pool`, which leases a node to each request, then `node` (what
is known of one).
"""

from __future__ import annotations
