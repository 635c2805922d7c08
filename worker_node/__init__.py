"""A worker node: serves embeddings and text generation from the Intel NPU, GPU or CPU beside it."""

import os
import sys

# numpy multiplies small matrices here. Its threads spin while they wait for each other: on busy cores that took twenty
# times the CPU time of one thread. Read when numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# `import openvino` reports each import to Intel over the network and creates ~/intel. Without this package it does
# neither. Every process imports `worker_node` before OpenVINO: `banned-api` in pyproject.toml keeps it so.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None forbids the import
# Its converter of other frameworks' models, which nothing here uses and each process would import.
sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type]

__version__: str
__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """`__version__`, read when it is first asked for: each child process imports this package, few need its version."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415  (a third of what importing this package would take)

    globals()[name] = found = version("npu-node")
    return found
