"""Which node gets a request: what is known of each node and model, and what each outcome teaches.

It may import `http`, `settings` and the plain modules, and knows no call, no retry and no cloud. Pure, the clock
injected, but for `probes` and `discovery`. Begin with `pool`, which leases a node to each request, then `choose` (who
is eligible, who is chosen) and `node` (what is known of one).
"""

from __future__ import annotations
