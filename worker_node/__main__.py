"""`python -m worker_node`: the same as `npu-node`."""

import sys

if __name__ == "__main__":
    try:
        # Here, since an interrupt while this is imported would end in a traceback.
        from worker_node.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
