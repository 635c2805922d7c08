"""Runs work on client input that may take too long in processes that can be killed: schemas, large prompts, media.

A call has a limit of CPU time, wall time and memory. A process that exceeds one is replaced, and the request that was
being prepared is refused as the cause; no other request is affected, and the event loop is never blocked. It may import
`core`. Begin with `pool.PreparationPool`; `worker` is what its processes run."""

from __future__ import annotations
