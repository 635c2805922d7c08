"""One call over the fleet and the cloud: deadline, attempts, retries, fallback.

It may import `fleet`, `http` and `cloud`. Begin with `call.Dispatcher`, the whole policy of attempts; then `backend`
(requests to the fleet) and `fallback` (the fleet first, then the cloud).
"""

from __future__ import annotations
