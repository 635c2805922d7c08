"""The program of the bundle: `npu-node`; `-m MODULE` and `-c CODE` run child processes, as with Python itself."""

from __future__ import annotations

import runpy
import sys


def main() -> int:
    """Run a module of the bundle, code, or the command line."""
    if sys.argv[1:2] == ["-m"] and len(sys.argv) > 2:
        module = sys.argv[2]
        # As Python leaves it: the module in the first place, then its own arguments.
        del sys.argv[1:3]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    if sys.argv[1:2] == ["-c"] and len(sys.argv) > 2:
        sys.argv, code = ["-c", *sys.argv[3:]], sys.argv[2]
        exec(code, {"__name__": "__main__"})  # noqa: S102  (what the node gives its own child)
        return 0
    import npu_commands  # noqa: PLC0415  (a child process does not need it)

    return npu_commands.node()


if __name__ == "__main__":
    sys.exit(main())
