"""`npu-client` on the command line."""

from __future__ import annotations
