"""Scheduling: whether a request is admitted and in what order work runs. Pure: no device, no clock of its own.

`admission` runs in the edge process; `prompts` and `texts` order work inside an engine. May
import `core`. Begin with `admission`."""
