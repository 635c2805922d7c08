"""Rewrites a GGUF file so that GenAI can read it.

GenAI's reader knows a few quantizations. Its weights are replaced by the exact ones afterwards (exact_weights.py), so
it is enough that it reads something close: tensors of other types become 8-bit ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from worker_node.models.conversion.gguf_file import GgufFile

_READABLE = frozenset(
    {
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q6_K,
    }
)
_Q8_BLOCK = 32
# The reader and the writer make these themselves.
_OWN_FIELDS = ("GGUF.", "general.architecture")


def readable_file(gguf: GgufFile, scratch: Path) -> Path:
    """The file itself, or one in `scratch` with the same metadata and every tensor in a type that GenAI reads.

    One tensor at a time is in memory.
    """
    types = gguf.types()
    if all(kind in _READABLE for kind in types.values()):
        return gguf.path
    target = scratch / "readable.gguf"
    writer = GGUFWriter(target, gguf.architecture)
    _copy_metadata(gguf, writer)
    kinds = {name: _readable_type(kind, gguf.shapes()[name]) for name, kind in types.items()}
    for name, shape in gguf.shapes().items():
        packed = gguf.packed(name)
        if kinds[name] is types[name]:
            writer.add_tensor_info(name, packed.shape, packed.dtype, packed.nbytes, raw_dtype=kinds[name])
        elif kinds[name] is GGMLQuantizationType.F16:
            writer.add_tensor_info(name, shape, np.dtype(np.float16), 2 * int(np.prod(shape)))
        else:
            size = int(np.prod(shape)) // _Q8_BLOCK * (_Q8_BLOCK + 2)
            packed_shape = (*shape[:-1], shape[-1] // _Q8_BLOCK * (_Q8_BLOCK + 2))
            writer.add_tensor_info(name, packed_shape, np.dtype(np.uint8), size, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind in kinds.items():
        writer.write_tensor_data(gguf.packed(name) if kind is types[name] else _converted(gguf, name, kind))
    writer.close()
    return target


def _readable_type(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> GGMLQuantizationType:
    if kind in _READABLE:
        return kind
    return GGMLQuantizationType.F16 if shape[-1] % _Q8_BLOCK else GGMLQuantizationType.Q8_0


def _converted(gguf: GgufFile, name: str, kind: GGMLQuantizationType) -> NDArray[Any]:
    values = gguf.stored_values(name)
    if kind is GGMLQuantizationType.F16:
        return values.astype(np.float16)
    packed: NDArray[Any] = quantize(values, kind)
    return packed


def _copy_metadata(gguf: GgufFile, writer: GGUFWriter) -> None:
    for name, field in gguf.fields().items():
        if name.startswith(_OWN_FIELDS):
            continue
        sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
