"""A worker node: serves embeddings and text generation from the Intel NPU, GPU or CPU beside it."""

from importlib.metadata import version

__version__ = version("npu-node")
__all__ = ["__version__"]
