"""`python -m worker_node`: the same as `npu-node`."""

import sys

from worker_node.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
