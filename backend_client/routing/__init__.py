"""One call over the fleet and the cloud: deadline, attempts, retries, hedging, fallback.

It may import `fleet`, `http` and `cloud`. Begin with `call.Dispatcher`, which owns what follows a failed attempt; then
`backend` (the fleet: one method for each kind of call) and `fallback` (the fleet first, then the cloud). `runtime`
starts and ends what runs beside the calls.
"""

from __future__ import annotations
