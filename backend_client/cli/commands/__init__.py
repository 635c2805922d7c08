"""The subcommands of `npu-client`: `add_parser` declares one, its `run` is a coroutine that returns the exit status."""

from __future__ import annotations
