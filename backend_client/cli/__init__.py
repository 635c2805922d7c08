"""`npu-client`, the command line, and the dashboard of a fleet. It may import every other package; only
the gateway imports it, which shows the same pages.

Begin with `main`. Further commands have a module with `add_parser`, and `run`, which returns the exit status.
"""

from __future__ import annotations
