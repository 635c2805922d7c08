"""Makes a generation model of a GGUF file: its exact weights in the graph that GenAI made of it, compressed, measured.

The graph does not say which constant is which tensor. Both come from the same numbers, though, and no two
tensors of a trained model are alike, so each constant is matched to the tensor of its shape that it is
nearest to, and where a tied matrix is stored twice, by what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from numpy.typing import NDArray
from openvino import Input, Node, Output, passes
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.convert.compression import PROBE_TEXTS, compare, compress, exact_logits, teacher_forced_logits
from worker_node.models.convert.gguf import (
    GgufFile,
    import_graph,
    note_mapped,
    pages_dropped,
    readable_file,
    repeat_by_constant,
)
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.directory import MODEL_FILE, GenerationCanary, family_of

# Chosen by fidelity and speed together: docs/models.md has the figures.
DEFAULT_QUANTIZATION = Quantization.INT4_INT8
# Below this agreement with the exact weights the result is another model, not a smaller one.
_MIN_TOP1 = 0.6
_TOKEN_FIELDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# Relative distance (norm of the difference by norm of the tensor) up to which a constant may be taken for a
# tensor: GenAI's rounding changes Q4_1 matrices by 0.09, a wrong matrix of the same shape is 1.4 away.
_NEAR = 0.2
# And the runner-up must be this many times farther. Norm weights resemble each other, but are imported almost
# exactly.
_CLEARLY = 3.0
# Constants of fewer elements are scalars and shapes of the graph itself.
_SMALL = 16
# Rows of a matrix that are dequantised at a time.
_ROWS_AT_ONCE = 8192
# Rows of a matrix that are compared.
_SAMPLE_ROWS = 8

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

_DEQUANTISATION = frozenset({"Convert", "Subtract", "Multiply", "Reshape"})


@dataclass
class _Weight:
    """A constant sub-graph (packed weights, scales, zero points) and all that read its result."""

    output: Output
    readers: list[Input] = field(default_factory=list)


def restore_exact_weights(model: ov.Model, gguf: GgufFile, room: Path) -> int:
    """Replace every weight of the graph by the file's own, matrices as f16, vectors as f32; returns their
    number.

    The matrices are written to files in `room` and mapped: they are there as long as the graph is used.

    Raises ConversionFailed when a constant or a tensor is left unmatched, or a match is not beyond doubt.
    """
    shapes = {name: _squeeze(shape) for name, shape in gguf.shapes().items()}
    samples = {name: _sample_tensor(gguf, name) for name in shapes}
    rotary = _rotary_shape(gguf)
    left = set(shapes)
    for weight in _find_weights(model):
        full = tuple(weight.output.get_shape())
        shape = _squeeze(full)
        candidates = _candidates(weight, shape, shapes)
        if not candidates and shape == rotary:
            continue  # frequencies of the rotary embedding, computed by GenAI from the metadata
        sample = sample_of(weight.output)
        name = _nearest(gguf, shape, sample, {name: samples[name] for name in candidates})
        if name not in left:
            raise ConversionFailed(f"{gguf.path}: two constants of the graph match tensor {name}")
        left.discard(name)
        if len(shape) > 1:
            _replace_matrix(weight, name, _halved(gguf, name, room).reshape(full))
        else:
            _replace(weight, op.constant(gguf.tensor(name).reshape(full), name=name))
    if left:
        raise ConversionFailed(f"{gguf.path}: no constant of the graph matches {', '.join(sorted(left))}")
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
            if constant[name] and source.get_element_type().is_real() and _exact_weights_count(source) >= _SMALL:
                found.setdefault(name, _Weight(source)).readers.append(port)
    return list(found.values())


def _exact_weights_count(output: Output) -> int:
    return int(np.prod(list(output.get_shape())))


def _fold(output: Output) -> NDArray[np.float32]:
    result = op.result(output)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(ov.Model([result], [], "weight"))
    return np.array(result.input_value(0).get_node().data, dtype=np.float32)


def _halved(gguf: GgufFile, name: str, room: Path) -> NDArray[np.float16]:
    """A matrix in f16, in a mapped file: its pages are dropped, so it takes no memory from anybody."""
    shape = gguf.shapes()[name]
    mapped: NDArray[np.float16] = np.memmap(room / f"{name}.f16", dtype=np.float16, mode="w+", shape=shape)
    for first in range(0, shape[0], _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, shape[0]), dtype=np.intp)
        mapped[rows[0] : rows[-1] + 1] = gguf.tensor(name, rows)
    note_mapped(mapped)
    return mapped


def _replace_matrix(weight: _Weight, name: str, values: NDArray[np.float16]) -> None:
    constant = op.constant(values, name=name, shared_memory=True)
    _replace(weight, op.convert(constant, "f32"))


def _replace(weight: _Weight, source: Node) -> None:
    for reader in weight.readers:
        reader.replace_source_output(source.output(0))


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def sample_of(output: Output) -> NDArray[np.float32]:
    """The rows of a constant sub-graph that are compared; the other rows of a matrix are not computed."""
    full = tuple(output.get_shape())
    shape = _squeeze(full)
    if len(full) > 1 and full == shape:
        return _rows_of(output, _sample_rows(full[0]), full[0])
    values = _fold(output).reshape(shape)
    return values if values.ndim == 1 else values[_sample_rows(shape[0])]


def _rows_of(output: Output, rows: NDArray[np.intp], count: int) -> NDArray[np.float32]:
    """Some of the `count` rows that a dequantisation gives. All its operations work row by row."""
    node = output.get_node()
    match node.get_type_name():
        case "Constant":
            return _constant_rows(node, rows, count)
        case "Reshape":
            values = _rows_of(node.input_value(0), rows, count)
            return values.reshape(len(rows), *tuple(output.get_shape())[1:])
        case "Convert":
            return _rows_of(node.input_value(0), rows, count)
    left, right = (_rows_of(node.input_value(port), rows, count) for port in (0, 1))
    return left - right if node.get_type_name() == "Subtract" else left * right


def _constant_rows(node: Node, rows: NDArray[np.intp], count: int) -> NDArray[np.float32]:
    shape = tuple(node.get_output_shape(0))
    kind = node.get_output_element_type(0).get_type_name()
    by_row = bool(shape) and shape[0] == count
    if kind not in {"u4", "i4"}:
        data = np.asarray(node.data)
        return (data[rows] if by_row else data).astype(np.float32)
    packed = np.asarray(node.data).reshape(-1)
    per_row = int(np.prod(shape[1:]))
    if by_row and per_row % 2 == 0:
        packed, by_row, shape = packed.reshape(count, -1)[rows].reshape(-1), False, (len(rows), *shape[1:])
    # Two to a byte, the first in the lower half.
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[: int(np.prod(shape))]
    values = halves.astype(np.float32).reshape(shape)
    if kind == "i4":
        values = np.where(values > 7, values - 16, values).astype(np.float32)
    return values[rows] if by_row else values


def _sample_tensor(gguf: GgufFile, name: str) -> NDArray[np.float32]:
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


def convert_gguf(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Import, restore, repair, compress, save, measure; raises ConversionFailed when any of it cannot be done."""
    with pages_dropped():
        return _convert(job, stage)


def _convert(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    target = Path(job.target)
    quantization = job.quantization or DEFAULT_QUANTIZATION
    gguf = GgufFile(_only_gguf(Path(job.source)))
    stage("importing the graph and the tokenizer")
    model = import_graph(readable_file(gguf, Path(job.scratch)), target, Path(job.scratch))
    tokenizer = openvino_genai.Tokenizer(target)
    probes = [tokenizer.encode(text).input_ids.data[0].tolist() for text in PROBE_TEXTS]
    template = str(gguf.get("tokenizer.chat_template") or "")
    _write_configs(gguf, target, template)
    stage("restoring the exact weights")
    restore_exact_weights(model, gguf, Path(job.scratch))
    repeat_by_constant(model, _count(gguf, "attention.head_count") // _count(gguf, "attention.head_count_kv"))
    stage(f"compressing the weights to {quantization}")
    ov.save_model(compress(model, quantization), target / MODEL_FILE, compress_to_fp16=False)
    del model
    stage("measuring the compressed model against the exact one")
    stored = teacher_forced_logits(ov.Core().read_model(target / MODEL_FILE), probes)
    fidelity = compare(exact_logits(gguf, probes), stored)
    if fidelity.top1 < _MIN_TOP1:
        raise ConversionFailed(
            f"{job.id}: with weights in {quantization} only {fidelity.top1:.0%} of the predictions are those of the "
            "exact weights; choose a finer quantization"
        )
    if job.canary is not None:
        stage("asking the canary's question")
        _expect_answer(job.id, target, job.canary)
    return Converted(
        kind=ModelKind.GENERATION,
        family=family_of(gguf.architecture, template),
        quantization=quantization,
        context_limit=_count(gguf, "context_length"),
        fidelity=fidelity,
        canary=job.canary,
    )


def _only_gguf(source: Path) -> Path:
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ConversionFailed(f"{source}: holds {len(found)} GGUF files, one is needed")
    return found[0]


def _count(gguf: GgufFile, name: str) -> int:
    return gguf.hyperparameter(name)


def _write_configs(gguf: GgufFile, target: Path, template: str) -> None:
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_FIELDS.items()}
    known = {name: int(value) for name, value in ids.items() if value is not None}
    # The answer ends at the end-of-sequence token only because this file says which it is.
    _write_json(target / "generation_config.json", known)
    sizes = {
        "hidden_size": _count(gguf, "embedding_length"),
        "num_hidden_layers": _count(gguf, "block_count"),
        "num_attention_heads": _count(gguf, "attention.head_count"),
        "num_key_value_heads": _count(gguf, "attention.head_count_kv"),
        "max_position_embeddings": _count(gguf, "context_length"),
    }
    _write_json(target / "config.json", {"model_type": gguf.architecture, **sizes, **known})
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, int | str]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _expect_answer(model_id: str, target: Path, canary: GenerationCanary) -> None:
    pipeline = openvino_genai.LLMPipeline(target, "CPU")
    config = pipeline.get_generation_config()
    config.max_new_tokens = canary.max_new_tokens
    config.do_sample = False
    answer = pipeline.generate([canary.prompt], config).texts[0]
    if not canary.accepts(answer):
        raise ConversionFailed(
            f"{model_id}: asked {canary.prompt!r}, the converted model answered {answer[:80]!r}, without "
            f"{' and '.join(canary.expected)}; a node would not serve it. Choose another quantization"
        )
