"""A worker node: serves embeddings and text generation from the Intel NPU, GPU or CPU beside it."""

import sys
from importlib.metadata import version

# `import openvino` reports each import to its makers over the network, and leaves a directory in the user's home.
# Without the package that does it, it and nncf do without: their own way to be told so.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None forbids the import

__version__ = version("npu-node")
__all__ = ["__version__"]
