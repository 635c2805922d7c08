"""Engines: a model on a device, in a process of its own that is supervised, restarted and never trusted to end in time.

May import `core`, `devices`, `scheduling`; knows no task. Begin with `supervisor` (the loop around one process), then
`process` (from spawn to exit), `protocol` (what is said between both processes) and `child` (the loop inside)."""
