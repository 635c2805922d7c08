"""Reads a GGUF file: what it says of the model, and its weights exactly as llama.cpp would see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderField, ReaderTensor, dequantize
from numpy.typing import NDArray

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.mapped_pages import note_mapped

# Architectures whose query and key rows llama.cpp stores with the two halves of each rotary pair interleaved.
_PERMUTED = frozenset({"llama"})


class GgufFile:
    """An open GGUF file.

    Raises ConversionFailed when the file is not one, or lacks a field that is asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:
            raise ConversionFailed(f"{path}: not a readable GGUF file ({error})") from error
        note_mapped(self._reader.data)
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture: str = self.field("general.architecture")

    def field(self, name: str) -> Any:
        """A metadata field."""
        value = self.get(name)
        if value is None:
            raise ConversionFailed(f"{self.path}: no field {name}")
        return value

    def get(self, name: str) -> Any:
        """A metadata field, or None."""
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    def hyperparameter(self, name: str) -> int:
        """A whole number that describes the architecture, such as `attention.head_count`."""
        return int(self.field(f"{self.architecture}.{name}"))

    def types(self) -> dict[str, GGMLQuantizationType]:
        """How each tensor is quantized."""
        return {name: tensor.tensor_type for name, tensor in self._tensors.items()}

    def packed(self, name: str) -> NDArray[Any]:
        """A tensor as the file holds it."""
        data: NDArray[Any] = self._tensors[name].data
        return data

    def stored_values(self, name: str) -> NDArray[np.float32]:
        """A tensor, dequantised exactly, in the file's own row order."""
        tensor = self._tensors[name]
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values

    def fields(self) -> dict[str, ReaderField]:
        """All metadata, by name."""
        return dict(self._reader.fields)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by name, with its shape in row-major order."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def tensor(self, name: str, rows: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """A tensor, or some `rows` of a matrix, dequantised exactly, in the row order of the published model."""
        tensor = self._tensors[name]
        order = self._row_order(name)
        if rows is not None:
            order = rows if order is None else order[rows]
        packed = tensor.data if order is None else tensor.data[order]
        values: NDArray[np.float32] = dequantize(packed, tensor.tensor_type).astype(np.float32, copy=False)
        return values

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        """The published order of the rows, where the file has another."""
        if self.architecture not in _PERMUTED or not name.endswith(("attn_q.weight", "attn_k.weight")):
            return None
        count = "attention.head_count" if "attn_q" in name else "attention.head_count_kv"
        rows, heads = self.shapes()[name][0], self.hyperparameter(count)
        order: NDArray[np.intp] = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return order
