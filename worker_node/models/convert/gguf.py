"""GGUF files: their tensors, the graph that GenAI makes of them, and mapped weights kept out of resident memory."""

from __future__ import annotations

import mmap
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderField, ReaderTensor, dequantize
from gguf.quants import quantize
from numpy.typing import NDArray
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed

_PERIOD_S = 0.1
_mapped: list[weakref.ref[mmap.mmap]] = []


def note_mapped(array: NDArray[Any]) -> None:
    """Have the pages of this `numpy.memmap` dropped by `pages_dropped` for as long as it is mapped."""
    if isinstance(array.base, mmap.mmap):
        _mapped.append(weakref.ref(array.base))


@contextmanager
def pages_dropped() -> Iterator[None]:
    """While the block runs, drop the pages of what was noted ten times a second.

    They stay in the kernel's cache, written ones too, which gives them back when they are read again, or to others who
    need the memory.
    """
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(_PERIOD_S):
            drop_pages()

    thread = threading.Thread(target=drop, name="mapped pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def drop_pages() -> None:
    """Drop them once."""
    for reference in _mapped:
        mapping = reference()
        # Its owner may not unmap it as long as it is held here.
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


# Architectures whose query and key rows llama.cpp stores with the two halves of each rotary pair interleaved.
_PERMUTED = frozenset({"llama"})


class GgufFile:
    """An open GGUF file: what it says of the model, and its weights exactly as llama.cpp would see them.

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


# Those that GenAI's reader knows. Its weights are replaced by the exact ones afterwards, so it is enough that it reads
# something close: tensors of other types become 8-bit ones.
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


TOKENIZER_FILES = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
_NO_DEVICE = "NONE"
# The error for it names it; any other is about the import, whatever has been written by then.
_NAMES_NO_DEVICE = re.compile(rf'[Dd]evice.*"{_NO_DEVICE}"')
# The value cache of each layer is named as if it were a second key cache; on an NPU the names become those of
# inputs and outputs, which must differ.
_MISNAMED_VALUE_CACHE = re.compile(r"(past_key_values\.(\d+)\.valuepresent\.\2\.)key")


def import_graph(gguf: Path, target: Path, scratch: Path) -> ov.Model:
    """Import the file; leaves the tokenizer in `target` and returns the graph, with GenAI's approximate weights.

    GenAI rounds the minimum of every group to a whole number of steps, so only graph and tokenizer are taken from it.

    Raises ConversionFailed when GenAI does not know the architecture.
    """
    linked = scratch / "model.gguf"
    linked.symlink_to(gguf.resolve())
    failure: RuntimeError | None = None
    try:
        # It writes the files, then compiles them, for nothing: on a device that does not exist that fails at once.
        openvino_genai.LLMPipeline(linked, _NO_DEVICE, enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
    except RuntimeError as error:
        failure = error
    missing = [name for name in ("openvino_model.xml", *TOKENIZER_FILES) if not (scratch / name).is_file()]
    if failure is None or missing or _NAMES_NO_DEVICE.search(str(failure)) is None:
        reason = failure or f"it compiled the model for {_NO_DEVICE}"
        raise ConversionFailed(f"{gguf}: OpenVINO GenAI cannot import it ({reason})") from failure
    for name in TOKENIZER_FILES:
        shutil.move(scratch / name, target / name)
    graph = scratch / "openvino_model.xml"
    graph.write_text(_MISNAMED_VALUE_CACHE.sub(r"\1value", graph.read_text()))
    return ov.Core().read_model(graph)


_GROUPED_QUERY_RANK = 5


def repeat_by_constant(model: ov.Model, repeats: int) -> int:
    """Let the grouped-query repeat of keys and values broadcast to a constant shape; returns how many were
    changed.

    GenAI builds the target shape [batch, kv_heads, repeats, 0, head] with a zero for the length. The static
    shapes of the NPU path make "Broadcast incorrect target shape" of it. A bidirectional broadcast to [1, 1,
    repeats, 1, 1] says the same without naming the other dimensions.

    Raises ConversionFailed when the graph's repeats are not those of the metadata.
    """
    changed = 0
    for node in model.get_ordered_ops():
        shape = node.get_output_partial_shape(0) if node.get_output_size() else None
        if node.get_type_name() != "Broadcast" or shape is None or shape.rank.get_length() != _GROUPED_QUERY_RANK:
            continue
        if shape[2].is_static and shape[2].get_length() != repeats:
            raise ConversionFailed(f"{node.friendly_name} repeats {shape[2]} times, the metadata says {repeats}")
        target = op.constant(np.array([1, 1, repeats, 1, 1], dtype=np.int64))
        repeated = op.broadcast(node.input_value(0), target, broadcast_spec="BIDIRECTIONAL")
        node.output(0).replace(repeated.output(0))
        changed += 1
    model.validate_nodes_and_infer_types()
    return changed
