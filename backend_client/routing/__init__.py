"""One call over the fleet and the cloud: attempts, retries, fallback."""

from __future__ import annotations
