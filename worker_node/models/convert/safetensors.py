"""Reads a safetensors file as numpy arrays, bfloat16 included, which numpy itself does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from worker_node.core.errors import ConversionFailed

_FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """All floating-point tensors of the file by name, as float32; integer ones (buffers) are left out.

    Raises ConversionFailed when the file is damaged or holds a float type that is not known.
    """
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise ConversionFailed(f"{path}: not a readable safetensors file ({error})") from error
    result: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tensors:
        dtype, shape, data = tensor["dtype"], tensor["shape"], tensor["data"]
        if dtype == "BF16":
            widened = np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16
            result[name] = widened.view(np.float32).reshape(shape)
        elif dtype in _FLOATS:
            result[name] = np.frombuffer(data, dtype=_FLOATS[dtype]).astype(np.float32).reshape(shape)
        elif dtype.startswith("F"):
            raise ConversionFailed(f"{path}: tensor {name} has type {dtype}, which is not known")
    return result
