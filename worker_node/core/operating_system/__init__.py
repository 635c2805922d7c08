"""The services of the operating system beyond Python's own. Both halves have the same names.

Readers of /proc and /sys are elsewhere: where these are missing they return nothing, and the node serves without."""

import os
import sys

if sys.platform == "win32" or os.environ.get("NPU_NODE_PORTABLE") == "1":
    from worker_node.core.operating_system.portable import *  # noqa: F403
else:
    from worker_node.core.operating_system.linux import *  # noqa: F403
