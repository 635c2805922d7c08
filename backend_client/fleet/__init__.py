"""Which node gets a request. Pure, the clock injected; only `health` does I/O."""

from __future__ import annotations
