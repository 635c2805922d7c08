"""`npu-client` on the command line.

`main` finds the commands: each has a module with `add_parser`, and `run`, a coroutine that returns the exit status.
"""

from __future__ import annotations
