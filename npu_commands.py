"""The entry points of the commands: Ctrl-C while a program is still imported ends it with one line, as it does later.

They stand beside the packages, since importing a module of a package imports the package first.
"""

import io
import os
import sys


def node() -> int:
    """`npu-node`: see `worker_node.cli.main.main`."""
    _complete_streams()
    try:
        from worker_node.cli.main import main
    except KeyboardInterrupt:
        return _interrupted("npu-node")
    return main()


def client() -> int:
    """`npu-client`: see `backend_client.cli.main.main`."""
    _complete_streams()
    try:
        from backend_client.cli.main import main
    except KeyboardInterrupt:
        return _interrupted("npu-client")
    return main()


def gateway() -> int:
    """`npu-gateway`: see `backend_client.gateway.cli.main`."""
    _complete_streams()
    try:
        from backend_client.gateway.cli import main
    except KeyboardInterrupt:
        return _interrupted("npu-gateway")
    return main()


def _complete_streams() -> None:
    """Streams that the caller closed (`>&-`, some service managers) lead to nowhere, and no character fails a print.

    Bytes that are not text in the locale's encoding are read as surrogates, as in arguments: commands refuse them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order the lowest free number is the stream's own, so no other file gets it.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _interrupted(name: str) -> int:
    print(f"{name}: interrupted", file=sys.stderr)
    return 130
