"""`python -m backend_client` is `npu-client`."""

import sys

from backend_client.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
