"""The entry points of the commands: Ctrl-C while a program is still imported ends it with one line, as it does later.

They stand beside the packages, since importing a module of a package imports the package first.
"""

import sys


def node() -> int:
    """`npu-node`: see `worker_node.cli.main`."""
    try:
        from worker_node.cli import main
    except KeyboardInterrupt:
        return _interrupted("npu-node")
    return main()


def client() -> int:
    """`npu-client`: see `backend_client._cli.main.main`."""
    try:
        from backend_client._cli.main import main
    except KeyboardInterrupt:
        return _interrupted("npu-client")
    return main()


def _interrupted(name: str) -> int:
    print(f"{name}: interrupted", file=sys.stderr)
    return 130
