"""Makes a generation model of a GGUF file: the graph and tokenizer that GenAI makes of it, with the file's own weights.

GenAI rounds the minimum of every group to a whole number of steps, so its weights are not exact. Its graph does not say
which constant is which tensor either. Both come from the same numbers, though, and no two tensors of a trained model
are alike: each constant is matched to the tensor of its shape that it is nearest to, and where a tied matrix is stored
twice, by what reads it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from openvino import Input, Node, Output, passes
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILES, family_of
from worker_node.models.sources.selection import require_known_architecture

# Chosen by fidelity and speed together: docs/models.md has the figures.
DEFAULT_QUANTIZATION = Quantization.INT4_INT8
_TOKEN_FIELDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def convert_gguf(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Import, restore the weights, repair, save; raises ConversionFailed when any of it cannot be done."""
    source, target, scratch = Path(job.source), Path(job.target), Path(job.scratch)
    quantization = job.quantization or DEFAULT_QUANTIZATION
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise ConversionFailed(f"{source}: holds {len(files)} GGUF files, one is needed")
    gguf = GgufFile(files[0])
    stage("importing the graph and the tokenizer")
    model = import_graph(gguf, target, scratch)
    template = str(gguf.get("tokenizer.chat_template") or "")
    _write_configs(gguf, target, template)
    stage(f"storing the weights in {quantization}")
    restore_weights(model, gguf, quantization)
    heads, kv_heads = gguf.hyperparameter("attention.head_count"), gguf.hyperparameter("attention.head_count_kv")
    repeat_by_constant(model, heads // kv_heads)
    ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    return Converted(
        kind=ModelKind.GENERATION,
        family=family_of(gguf.architecture, template),
        quantization=quantization,
        context_limit=gguf.hyperparameter("context_length"),
    )


# Architectures whose query and key rows llama.cpp stores with the two halves of each rotary pair interleaved.
_PERMUTED = frozenset({"llama"})
# What GenAI's reader knows.
_READABLE = frozenset({"F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})
# The tensors that its graph has, by architecture, without the number of their block.
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_ATTENTION = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
_TENSORS = {_EMBEDDING, _OUTPUT, "output_norm.weight", *_ATTENTION} | {
    f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down")
}
_MORE_TENSORS = {
    "qwen2": {"attn_q.bias", "attn_k.bias", "attn_v.bias"},
    "qwen3": {"attn_q_norm.weight", "attn_k_norm.weight"},
}
_ROTARY_FREQUENCIES = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file: what it says of the model, and its weights exactly as llama.cpp would see them.

    Raises ConversionFailed when the file is not one, or lacks a field that is asked for, SourceRejected for another
    architecture than those that can be converted, tensors and rotary embeddings that the graph lacks, and a vocabulary
    beyond the embedding table. `known` bytes of the file are known; with a longer header nothing is judged.
    """

    def __init__(self, path: Path, known: int | None = None) -> None:
        self.path = path
        try:
            reader = GGUFReader(path)
        except Exception as error:
            if known is not None and known < path.stat().st_size:
                return
            raise ConversionFailed(f"{path}: not a readable GGUF file ({error})") from error
        if known is not None and reader.data_offset > known:
            return
        self._fields = reader.fields
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture: str = self.field("general.architecture")
        require_known_architecture(self.architecture, str(path))
        unreadable = {tensor.tensor_type.name for tensor in reader.tensors} - _READABLE
        if unreadable:
            raise ConversionFailed(
                f"{path}: has tensors in {', '.join(sorted(unreadable))}; OpenVINO GenAI reads "
                f"{', '.join(sorted(_READABLE))}. Choose another file of the same model: Q8_0 or Q4_0, or Q4_K_M of a "
                "larger one"
            )
        self._require_known_graph()

    def _require_known_graph(self) -> None:
        """GenAI builds its graph without a look at what it does not know, which then computes something else."""
        known = _TENSORS | _MORE_TENSORS.get(self.architecture, set())
        unknown = sorted(name for name in self._tensors if re.sub(r"^blk\.\d+\.", "", name) not in known)
        problem = ""
        if unknown == [_ROTARY_FREQUENCIES]:
            problem = f"scales its rotary frequencies ({_ROTARY_FREQUENCIES}, as Llama 3.1 and 3.2 do)"
        elif unknown:
            more = f" and {len(unknown) - 3} more" if unknown[3:] else ""
            problem = f"has tensors that no {self.architecture} model has ({', '.join(unknown[:3])}{more})"
        scaling = self.get(f"{self.architecture}.rope.scaling.type")
        if not problem and scaling not in (None, "none"):
            problem = f"scales its rotary embedding ({scaling})"
        tokens, rows = self._fields.get("tokenizer.ggml.tokens"), self.shapes().get(_EMBEDDING, (0,))[0]
        if not problem and tokens is not None and len(tokens.data) > rows:
            problem = f"has {len(tokens.data)} tokens and vectors for {rows} of them"
        if problem:
            raise SourceRejected(
                f"{self.path} {problem}, which the conversion of GGUF files does not support; take a repository of the "
                "same model in OpenVINO form: npu-node list --all shows some, others end in -ov"
            )

    def field(self, name: str) -> Any:
        """A metadata field."""
        value = self.get(name)
        if value is None:
            raise ConversionFailed(f"{self.path}: no field {name}")
        return value

    def get(self, name: str) -> Any:
        """A metadata field, or None."""
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def hyperparameter(self, name: str) -> int:
        """A whole number that describes the architecture, such as `attention.head_count`."""
        return int(self.field(f"{self.architecture}.{name}"))

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


_NO_DEVICE = "NONE"
# The error for it names it; any other is about the import, whatever has been written by then.
_NAMES_NO_DEVICE = re.compile(rf'[Dd]evice.*"{_NO_DEVICE}"')
# The value cache of each layer is named as if it were a second key cache; on an NPU the names become those of
# inputs and outputs, which must differ.
_MISNAMED_VALUE_CACHE = re.compile(r"(past_key_values\.(\d+)\.valuepresent\.\2\.)key")


def import_graph(gguf: GgufFile, target: Path, scratch: Path) -> ov.Model:
    """Import the file; leaves the tokenizer in `target` and returns the graph, with GenAI's approximate weights.

    Raises ConversionFailed when GenAI does not know the architecture.
    """
    linked = scratch / "model.gguf"
    linked.symlink_to(gguf.path.resolve())
    failure: RuntimeError | None = None
    try:
        # It writes the files, then compiles them, for nothing: on a device that does not exist that fails at once.
        openvino_genai.LLMPipeline(linked, _NO_DEVICE, enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
    except RuntimeError as error:
        failure = error
    missing = [name for name in (MODEL_FILE, *TOKENIZER_FILES) if not (scratch / name).is_file()]
    if failure is None or missing or _NAMES_NO_DEVICE.search(str(failure)) is None:
        reason = failure or f"it compiled the model for {_NO_DEVICE}"
        raise ConversionFailed(f"{gguf.path}: OpenVINO GenAI cannot import it ({reason})") from failure
    for name in TOKENIZER_FILES:
        shutil.move(scratch / name, target / name)
    graph = scratch / MODEL_FILE
    graph.write_text(_MISNAMED_VALUE_CACHE.sub(r"\1value", graph.read_text()))
    return ov.Core().read_model(graph)


_GROUPED_QUERY_RANK = 5


def repeat_by_constant(model: ov.Model, repeats: int) -> int:
    """Let the grouped-query repeat of keys and values broadcast to a constant shape; returns how many were changed.

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


def _write_configs(gguf: GgufFile, target: Path, template: str) -> None:
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_FIELDS.items()}
    known = {name: int(value) for name, value in ids.items() if value is not None}
    # The answer ends at the end-of-sequence token only because this file says which it is.
    _write_json(target / "generation_config.json", known)
    sizes = {
        "hidden_size": gguf.hyperparameter("embedding_length"),
        "num_hidden_layers": gguf.hyperparameter("block_count"),
        "num_attention_heads": gguf.hyperparameter("attention.head_count"),
        "num_key_value_heads": gguf.hyperparameter("attention.head_count_kv"),
        "max_position_embeddings": gguf.hyperparameter("context_length"),
    }
    _write_json(target / "config.json", {"model_type": gguf.architecture, **sizes, **known})
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, int | str]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Relative distance (norm of the difference by norm of the tensor) up to which a constant may be taken for a
# tensor: GenAI's rounding changes Q4_1 matrices by 0.09, a wrong matrix of the same shape is 1.4 away.
_NEAR = 0.2
# And the runner-up must be this many times farther. Norm weights resemble each other, but are imported almost exactly.
_CLEARLY = 3.0
# Constants of fewer elements are scalars and shapes of the graph itself.
_SMALL = 16
# Rows of a matrix that are compared.
_SAMPLE_ROWS = 8

_DEQUANTISATION = frozenset({"Convert", "Subtract", "Multiply", "Reshape"})


@dataclass
class _Weight:
    """A constant sub-graph (packed weights, scales, zero points) and all that read its result."""

    output: Output
    readers: list[Input] = field(default_factory=list)


def restore_weights(model: ov.Model, gguf: GgufFile, quantization: Quantization) -> int:
    """Replace every weight of the graph by the file's own, matrices as `stored_matrix`; returns their number.

    Raises ConversionFailed when a constant or a tensor is left unmatched, or a match is not beyond doubt.
    """
    shapes = {name: _squeeze(shape) for name, shape in gguf.shapes().items()}
    samples = {name: _sample_of_tensor(gguf, name) for name in shapes}
    rotary = _rotary_shape(gguf)
    left = set(shapes)
    for weight in _find_weights(model):
        full = tuple(weight.output.get_shape())
        shape = _squeeze(full)
        candidates = _candidates(weight, shape, shapes)
        if not candidates and shape == rotary:
            continue  # frequencies of the rotary embedding, computed by GenAI from the metadata
        sample = _sample_of_constant(weight.output)
        name = _nearest(gguf, shape, sample, {name: samples[name] for name in candidates})
        if name not in left:
            raise ConversionFailed(f"{gguf.path}: two constants of the graph match tensor {name}")
        left.discard(name)
        if len(shape) > 1:
            restored = stored_matrix(gguf, name, quantization)
        else:
            restored = op.constant(gguf.tensor(name).reshape(full), name=name)
        for reader in weight.readers:
            reader.replace_source_output(restored.output(0))
    if left:
        raise ConversionFailed(f"{gguf.path}: no constant of the graph matches {', '.join(sorted(left))}")
    # Where nncf notes it and others look for it; `read_directory` too.
    model.set_rt_info(str(quantization), ["nncf", "weight_compression", "mode"])
    return len(shapes)


def _candidates(weight: _Weight, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The tensors that a constant may be: those of its shape, and of two nearly equal ones the one for its reader.

    Files may store the tied matrix twice, in two quantizations: the embedding looks rows up, the output multiplies.
    """
    names = [name for name, known in shapes.items() if known == shape]
    if _EMBEDDING in names and _OUTPUT in names:
        looked_up = any(reader.get_node().get_type_name() == "Gather" for reader in weight.readers)
        names.remove(_OUTPUT if looked_up else _EMBEDDING)
    return names


def _find_weights(model: ov.Model) -> list[_Weight]:
    constant: dict[str, bool] = {}
    found: dict[str, _Weight] = {}
    for node in model.get_ordered_ops():
        sources = [port.get_source_output() for port in node.inputs()]
        kind = node.get_type_name()
        constant[node.friendly_name] = kind == "Constant" or (
            kind in _DEQUANTISATION and all(constant[source.get_node().friendly_name] for source in sources)
        )
        if constant[node.friendly_name]:
            continue
        for port, source in zip(node.inputs(), sources, strict=True):
            name = source.get_node().friendly_name
            if constant[name] and source.get_element_type().is_real() and np.prod(source.get_shape()) >= _SMALL:
                found.setdefault(name, _Weight(source)).readers.append(port)
    return list(found.values())


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _sample_of_constant(output: Output) -> NDArray[np.float32]:
    """A vector, or the rows of a matrix that are compared."""
    shape = _squeeze(tuple(output.get_shape()))
    node = op.reshape(output, np.array(shape, dtype=np.int64), special_zero=False)
    if len(shape) > 1:
        node = op.gather(node, op.constant(_sample_rows(shape[0])), op.constant(np.int64(0)))
    result = op.result(node)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(ov.Model([result], [], "weight"))
    return np.array(result.input_value(0).get_node().data, dtype=np.float32)


def _sample_of_tensor(gguf: GgufFile, name: str) -> NDArray[np.float32]:
    shape = gguf.shapes()[name]
    return gguf.tensor(name) if len(shape) == 1 else gguf.tensor(name, _sample_rows(shape[0]))


def _sample_rows(count: int) -> NDArray[np.intp]:
    return np.unique(np.linspace(0, count - 1, _SAMPLE_ROWS).astype(np.intp))


def _rotary_shape(gguf: GgufFile) -> tuple[int, ...]:
    heads = gguf.hyperparameter("attention.head_count")
    size = gguf.get(f"{gguf.architecture}.rope.dimension_count")
    return ((int(size) if size is not None else gguf.hyperparameter("embedding_length") // heads) // 2,)


def _nearest(
    gguf: GgufFile,
    shape: tuple[int, ...],
    values: NDArray[np.float32],
    samples: dict[str, NDArray[np.float32]],
) -> str:
    distances = sorted(
        (float(np.linalg.norm(values - sample) / max(float(np.linalg.norm(sample)), 1e-12)), name)
        for name, sample in samples.items()
    )
    if not distances or distances[0][0] > _NEAR:
        nearest = f"; the nearest, {distances[0][1]}, is {distances[0][0]:.2f} away" if distances else ""
        raise ConversionFailed(f"{gguf.path}: a constant of shape {shape} matches no tensor{nearest}")
    if len(distances) > 1 and distances[1][0] < _CLEARLY * distances[0][0]:
        raise ConversionFailed(
            f"{gguf.path}: a constant of shape {shape} could be {distances[0][1]} or {distances[1][1]}"
        )
    return distances[0][1]


# The smallest group that the NPU path accepts; one scale a row ruins the answers of a 135M model.
_GROUP = 64
# What the names of tensors that take 4 bits match, by form; all others take 8. The embedding table and the output
# matrix stay in int8 in every form, and int4_int8 has the matrices in int4 that bear it best (docs/models.md).
_FOUR_BITS = {
    Quantization.INT8_SYM: re.compile(r"(?!)"),
    Quantization.INT4_SYM: re.compile(r"blk\.\d+\..*"),
    Quantization.INT4_INT8: re.compile(r"blk\.\d+\.ffn_(gate|up)\.weight"),
}
# Weights that are in f32 at a time: a matrix of a large model would take gigabytes.
_WEIGHTS_AT_ONCE = 1 << 22


def stored_matrix(gguf: GgufFile, name: str, quantization: Quantization) -> Node:
    """The sub-graph, f32 [rows, columns], of a matrix in fewer bits: the numbers of nncf's symmetric modes.

    nncf itself takes 160 MB with what it needs, and 20 s for the smallest model: it is the oracle of the tests.
    Raises ConversionFailed for a form that generation models have not, and rows that are not a multiple of the group.
    """
    if quantization not in _FOUR_BITS:
        raise ConversionFailed(f"generation models are kept in {', '.join(_FOUR_BITS)}, not in {quantization}")
    rows, columns = gguf.shapes()[name]
    bits = 4 if _FOUR_BITS[quantization].fullmatch(name) else 8
    group = columns if bits == 8 else _GROUP
    if columns % group:
        raise ConversionFailed(
            f"{name} has rows of {columns} weights, no multiple of the {group} that share a scale in 4 bits; "
            f"choose {Quantization.INT8_SYM}"
        )
    numbers = np.empty((rows, columns // group, group), np.int8)
    scales = np.empty((rows, columns // group, 1), np.float16)
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = np.arange(first, min(first + step, rows), dtype=np.intp)
        # Through f16, as the weights of a published model are.
        values = gguf.tensor(name, part).astype(np.float16).astype(np.float32)
        numbers[part], scales[part] = quantise(values, bits, group)
    if bits == 8:
        stored, factor = op.constant(numbers.reshape(rows, columns)), op.constant(scales.reshape(rows, 1))
    else:
        # Two to a byte, the first in the lower half.
        halves = numbers.reshape(-1, 2).view(np.uint8)
        packed = ov.Tensor(ov.Type.i4, numbers.shape)
        packed.data.reshape(-1).view(np.uint8)[:] = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        stored, factor = op.constant(packed, shared_memory=True), op.constant(scales)
    stored.friendly_name, factor.friendly_name = name, f"{name}/scale"
    weights = op.multiply(op.convert(stored, "f16"), factor)
    if bits == 4:
        weights = op.reshape(weights, np.array([rows, columns], dtype=np.int64), special_zero=False)
    return op.convert(weights, "f32")


def quantise(values: NDArray[np.float32], bits: int, group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Whole numbers of `bits` bits, int8 [rows, groups, group], and what each group's are multiplied by, f32 [rows,
    groups, 1], of a matrix [rows, columns]; `columns` is a multiple of `group`.

    The number of the largest magnitude becomes the lowest level, since there is one more below zero than above it: the
    scale of a group whose largest number is positive is negative.
    """
    levels = 1 << (bits - 1)
    grouped = values.reshape(len(values), -1, group)
    lowest, highest = np.abs(grouped.min(axis=2, keepdims=True)), grouped.max(axis=2, keepdims=True)
    scales = np.where(lowest >= highest, lowest, -highest) / np.float32(levels)
    tiny = np.finfo(np.float32).eps
    scales = np.where(np.abs(scales) < tiny, tiny, scales)
    numbers = np.clip(np.rint(grouped / scales), -levels, levels - 1)
    return numbers.astype(np.int8), scales
