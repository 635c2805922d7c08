"""Makes a generation model of a GGUF file: OpenVINO's graph and GenAI's tokenizer, with the file's own weights.

The front end makes llama.cpp's graph: one sequence, with caches, positions and masks as inputs. GenAI wants batches,
caches that are states, and ports by its own names. The nodes that hold weights are named after the file's tensors. The
front end rounds the weights of some quantizations; each is replaced by the tensor that its node is named after.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from openvino import Node, Output
from openvino import opset13 as op
from openvino.frontend import FrontEndManager
from openvino.op import assign, read_value
from openvino.op.util import Variable, VariableInfo

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import i64, name_port, text_input
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILES, family_of

# Chosen by fidelity and speed together: docs/models.md has the figures.
DEFAULT_QUANTIZATION = Quantization.INT4_INT8
# The most parameters for int8 on an NPU: Intel's compiler predicts that it is the fastest; it takes twice the memory.
_INT8_ON_NPU = 2_000_000_000
_TOKEN_FIELDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}


def convert_gguf(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    source, target, scratch = Path(job.source), Path(job.target), Path(job.scratch)
    gguf = GgufFile(source)
    quantization, reason = (job.quantization, "as asked") if job.quantization else gguf.form_for(job.device)
    stage("importing the tokenizer and the graph")
    write_tokenizer(gguf, target, scratch)
    model = import_graph(gguf.path)

    template = str(gguf.get("tokenizer.chat_template") or "")
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_FIELDS.items()}
    # The answer ends at the end-of-sequence token only because this file says which it is.
    known = {name: int(value) for name, value in ids.items() if value is not None}
    sizes = {name: gguf.hyperparameter(key) for name, key in _SIZES.items()}
    config = {"model_type": gguf.architecture, **sizes, **known}
    for name, content in (("generation_config.json", known), ("config.json", config)):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")

    stage(f"storing the weights in {quantization}, {reason}")
    store_weights(model, gguf, quantization)
    ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    return Converted(
        kind=ModelKind.GENERATION,
        family=family_of(gguf.architecture, template),
        quantization=quantization,
        context_limit=gguf.hyperparameter("context_length"),
    )


# Those whose graph by OpenVINO's front end computes what llama.cpp does: a test compares each.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Architectures whose query and key rows llama.cpp stores with the two halves of each rotary pair interleaved.
_PERMUTED = frozenset({"llama"})
# What the front end reads, but for two and three bits, which would take more in the forms that are written.
_READABLE = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
# The kind of tokenizer that GenAI imports.
_BYTE_LEVEL = "gpt2"
# The tensors that the graph has, by architecture, without the number of their block.
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

    Raises ConversionFailed for a damaged file, SourceRejected for what the graph or the tokenizer would lack. Only
    `known` bytes of the file are there; with a longer header nothing is judged.
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

        self._fields, self._data = reader.fields, reader.data
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture: str = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise SourceRejected(
                f"{path} is a GGUF file of architecture {self.architecture!r}; those that can be converted are "
                f"{', '.join(ARCHITECTURES)}. Look for a repository of the same model that ends in -ov "
                "(npu-node list --all shows some)"
            )

        unreadable = {tensor.tensor_type.name for tensor in reader.tensors} - _READABLE
        if unreadable:
            raise ConversionFailed(
                f"{path}: has tensors in {', '.join(sorted(unreadable))}; OpenVINO reads "
                f"{', '.join(sorted(_READABLE))}. Choose another file of the same model, such as Q4_K_M or Q8_0"
            )
        self._require_known_graph()

    def _require_known_graph(self) -> None:
        """The front end ignores what it does not know, and the graph then computes something else."""
        known = _TENSORS | _MORE_TENSORS.get(self.architecture, set())
        unknown = sorted(name for name in self._tensors if re.sub(r"^blk\.\d+\.", "", name) not in known)
        more = f" and {len(unknown) - 3} more" if unknown[3:] else ""
        scaling = self.get(f"{self.architecture}.rope.scaling.type")
        window = int(self.get(f"{self.architecture}.attention.sliding_window") or 0)
        tokenizer, field = self.get("tokenizer.ggml.model"), self._fields.get("tokenizer.ggml.tokens")
        tokens, rows = 0 if field is None else len(field.data), self.shapes().get(_EMBEDDING, (0,))[0]
        problems = {
            f"scales its rotary frequencies ({_ROTARY_FREQUENCIES}, as Llama 3.1 and 3.2 do)": (
                unknown == [_ROTARY_FREQUENCIES]
            ),
            f"has tensors that no {self.architecture} model has ({', '.join(unknown[:3])}{more})": bool(unknown),
            f"scales its rotary embedding ({scaling})": scaling not in (None, "none"),
            f"attends to a sliding window of {window} tokens": 0 < window < self.hyperparameter("context_length"),
            f"has a tokenizer of the kind {tokenizer}, not {_BYTE_LEVEL}": tokenizer != _BYTE_LEVEL,
            f"has {tokens} tokens and vectors for {rows} of them": tokens > rows,
        }
        for problem in [problem for problem, applies in problems.items() if applies]:
            raise SourceRejected(
                f"{self.path} {problem}, which the conversion of GGUF files does not support; take a repository of the "
                "same model in OpenVINO form: npu-node list --all shows some, others end in -ov"
            )

    def vocabulary(self) -> bytes:
        end = min(tensor.field.offset for tensor in self._tensors.values())
        count = np.uint64(0).tobytes()  # after the magic and the version
        return bytes(self._data[:8]) + count + bytes(self._data[8 + len(count) : end])

    def field(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConversionFailed(f"{self.path}: no field {name}")
        return value

    def get(self, name: str) -> Any:
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def hyperparameter(self, name: str) -> int:
        return int(self.field(f"{self.architecture}.{name}"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by name, with its shape in row-major order."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def form_for(self, device: str | None) -> tuple[Quantization, str]:
        """The form of weights that suits a device (`npu`, `cpu`, None: any), and the reason."""
        parameters = sum(math.prod(shape) for shape in self.shapes().values())
        size = f"{parameters / 1e9:.2g} billion parameters"
        if device is None:
            return DEFAULT_QUANTIZATION, "which suits every device"
        if device == "cpu":
            return Quantization.INT4_INT8, f"because a CPU reads all weights for each token: {size}"
        if parameters <= _INT8_ON_NPU:
            return Quantization.INT8_SYM, f"the truest form, and the fastest on NPUs at {size}"
        return Quantization.INT4_INT8_CW, f"because int8 takes much memory at {size}, and NPUs are slow with groups"

    def tensor(self, name: str, rows: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """A tensor, or some `rows` of a matrix, dequantised exactly, in the row order of the published model."""
        tensor, order = self._tensors[name], rows
        if self.architecture in _PERMUTED and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = self.hyperparameter("attention.head_count" if "attn_q" in name else "attention.head_count_kv")
            count = self.shapes()[name][0]
            order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
            order = order if rows is None else order[rows]
        packed = tensor.data if order is None else tensor.data[order]
        values: NDArray[np.float32] = dequantize(packed, tensor.tensor_type).astype(np.float32, copy=False)
        return values


def write_tokenizer(gguf: GgufFile, target: Path, scratch: Path) -> None:
    # Of a file with weights GenAI would read them, and fail where it does not know their quantization.
    vocabulary = scratch / "vocabulary.gguf"
    vocabulary.write_bytes(gguf.vocabulary())
    try:
        openvino_genai.Tokenizer(vocabulary, enable_save_ov_model=True)
    except (RuntimeError, IndexError) as error:  # IndexError: a field of the file is missing
        raise ConversionFailed(f"{gguf.path}: OpenVINO GenAI cannot import its tokenizer ({error})") from error
    for name in TOKENIZER_FILES:
        shutil.move(scratch / name, target / name)


def store_weights(model: ov.Model, gguf: GgufFile, quantization: Quantization) -> None:
    """Replace every weight of the graph by the tensor of its name; graph and file must have the same ones."""
    outputs = weights(model)
    if odd := sorted(set(outputs) ^ set(gguf.shapes())):
        raise ConversionFailed(f"{gguf.path}: the graph and the file differ in the tensors {', '.join(odd)}")
    for name, output in outputs.items():
        vector = len(gguf.shapes()[name]) == 1
        stored = op.constant(gguf.tensor(name), name=name) if vector else stored_matrix(gguf, name, quantization)
        output.replace(stored.output(0))
    # Where nncf notes it and others look for it: NPUW, `read_directory`, `npu_rules`.
    notes = {"mode": str(quantization), "group_size": str(_GROUPS[quantization])}
    for name, note in notes.items():
        model.set_rt_info(note, ["nncf", "weight_compression", name])


# Weights that share a scale in 4 bits; -1: a row. The NPU path accepts no smaller group than 64.
_GROUPS = {
    Quantization.INT8_SYM: -1,
    Quantization.INT4_SYM: 64,
    Quantization.INT4_INT8: 64,
    Quantization.INT4_INT8_CW: -1,
}
_GATE_AND_UP = re.compile(r"blk\.\d+\.ffn_(gate|up)\.weight")
# What the names of tensors that take 4 bits match, by form; all others take 8. The embedding table and the output
# matrix stay in int8 in every form; the mixed forms have the matrices in int4 that bear it best (docs/models.md).
_FOUR_BITS = {
    Quantization.INT8_SYM: re.compile(r"(?!)"),
    Quantization.INT4_SYM: re.compile(r"blk\.\d+\..*"),
    Quantization.INT4_INT8: _GATE_AND_UP,
    Quantization.INT4_INT8_CW: _GATE_AND_UP,
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
    group = columns if bits == 8 or _GROUPS[quantization] < 0 else _GROUPS[quantization]
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

    shape = [rows, columns] if group == columns else list(numbers.shape)
    if bits == 8:
        stored = op.constant(numbers.reshape(shape))
    else:
        # Two to a byte, the first in the lower half.
        halves = numbers.reshape(-1, 2).view(np.uint8)
        packed = ov.Tensor(ov.Type.i4, shape)
        packed.data.reshape(-1).view(np.uint8)[:] = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        stored = op.constant(packed, shared_memory=True)
    factor = op.constant(scales.reshape([*shape[:-1], 1]))
    stored.friendly_name, factor.friendly_name = name, f"{name}/scale"
    weights = op.multiply(op.convert(stored, "f16"), factor)
    if group < columns:
        weights = op.reshape(weights, np.array([rows, columns], dtype=np.int64), special_zero=False)
    return op.convert(weights, "f32")


def quantise(values: NDArray[np.float32], bits: int, group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Numbers of `bits` bits, int8 [rows, groups, group], and scales, f32 [rows, groups, 1], of [rows, columns].

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


_WEIGHT_PREFIX = "weight.weight_"
_INPUTS = frozenset({"inp_tokens", "inp_pos", "inp_out_ids", "inp_kv_idx", "self_kq_mask", "token_len_per_seq"})
_CACHE_PREFIX = "cache_"


def import_graph(path: Path) -> ov.Model:
    """The graph of a file, with the front end's weights.

    The rows of query and key matrices must be put into the published order, with rotary pairs half a head apart.
    Raises ConversionFailed when the front end cannot make it, or makes another form than its decoders have.
    """
    front_end = FrontEndManager().load_by_framework("gguf")
    try:
        return _adapt(front_end.convert(front_end.load(str(path))))
    except RuntimeError as error:
        raise ConversionFailed(f"{path}: OpenVINO's GGUF front end cannot import it ({error})") from error


def weights(graph: ov.Model) -> dict[str, Output]:
    """What the graph takes for each tensor of the file, f32, by the tensor's name."""
    return {
        node.friendly_name.removeprefix(_WEIGHT_PREFIX): node.output(0)
        for node in graph.get_ops()
        if node.friendly_name.startswith(_WEIGHT_PREFIX)
    }


def _adapt(graph: ov.Model) -> ov.Model:
    ports = {port.any_name: port for port in graph.inputs}
    if unknown := sorted(name for name in ports if not name.startswith(_CACHE_PREFIX) and name not in _INPUTS):
        raise ConversionFailed(f"the graph has inputs that are not supported: {', '.join(unknown)}")
    ids, mask, positions = (text_input(name) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = op.parameter([-1], ov.Type.i32)
    name_port(beams.output(0), "beam_idx")
    # [1, 1, tokens, width] becomes [batch, 1, tokens, width].
    for gather, outer in _looked_up(ports["inp_tokens"]):
        looked_up = op.gather(gather.input_value(0), op.convert(ids, "i32"), gather.input_value(2))
        outer.output(0).replace(op.unsqueeze(looked_up, i64(1)).output(0))
    # [1, tokens, 1, 1] becomes [batch, tokens, 1, 1].
    for number in _readers(ports["inp_pos"], "Convert"):
        for turned in _readers(number.output(0), "Transpose"):
            turned.output(0).replace(op.unsqueeze(op.convert(positions, "f32"), i64(2, 3)).output(0))
    # The front end selects the rows whose logits are wanted; GenAI takes the last ones itself.
    for gather, outer in _looked_up(ports["inp_out_ids"]):
        outer.output(0).replace(gather.input_value(0).get_node().input_value(0))

    attentions = [node for node in graph.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    cache = _Cache(ids, beams)
    rotary, visible = _Rotary(graph), _visible(ids, mask)
    for layer, attention in enumerate(attentions):
        _replace_attention(layer, attention, cache, rotary, visible)
    # GenAI slices the rows of the last product, which must have three dimensions.
    head = _back(graph.output(0).get_node().input_value(0), "MatMul", _AFTER_HEAD)
    head.input(0).replace_source_output(op.squeeze(head.input_value(0), i64(1)).output(0))
    logits = op.result(graph.output(0).get_node().input_value(0))
    logits.output(0).set_names({"logits"})
    return ov.Model([logits], cache.sinks, [ids, mask, positions, beams], graph.friendly_name)


def _looked_up(indices: Output) -> Iterator[tuple[Node, Node]]:
    """Each node that gathers rows by these indices, and what gives its result four dimensions again."""
    for squeezed in _readers(indices, "Squeeze"):
        for gather in _readers(squeezed.output(0), "Gather"):
            for outer in _readers(gather.output(0), "Unsqueeze"):
                yield gather, outer


class _Cache:
    """Keys and values of the tokens so far: states, f32 [batch, heads, tokens, size]; `sinks` write them."""

    def __init__(self, ids: Node, beams: Node) -> None:
        self.sinks: list[Node] = []
        self._batch, self._beams = op.gather(op.shape_of(ids), i64(0), _axis(0)), beams

    def extend(self, layer: int, kind: str, new: Node) -> Node:
        _, heads, _, size = new.get_output_partial_shape(0)
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, size])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = Variable(info)
        shape = op.concat([self._batch, i64(heads.get_length(), 0, size.get_length())], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        past = op.gather(read_value(empty, variable), self._beams, _axis(0))
        joined = op.concat([past, new], 2)
        self.sinks.append(assign(joined, variable))
        return joined


def _replace_attention(layer: int, attention: Node, cache: _Cache, rotary: _Rotary, visible: Node) -> None:
    # Behind each conversion is the f32 value, [batch, tokens, heads, size], that was rounded to f16.
    query = rotary.turn(_back(attention.input_value(0), "Convert").input_value(0))
    heads, size = (query.get_output_partial_shape(0)[axis].get_length() for axis in (1, 3))
    kept = []
    for port, kind in ((1, "key"), (2, "value")):
        written = _back(attention.input_value(port), "ScatterUpdate").input_value(2)
        new = _back(written, "Convert").input_value(0)
        joined = cache.extend(layer, kind, rotary.turn(new) if kind == "key" else _by_heads(new))
        repeats = heads // joined.get_output_partial_shape(0)[1].get_length()
        if repeats > 1:
            # Broadcast to a constant shape: the NPU path cannot compute one.
            joined = op.broadcast(
                op.unsqueeze(joined, i64(2)), i64(1, 1, repeats, 1, 1), broadcast_spec="BIDIRECTIONAL"
            )
            joined = op.reshape(joined, i64(0, heads, -1, size), special_zero=True)
        kept.append(joined)

    # The front end rounds the scale to f16.
    scale, usual = np.float32(attention.input_value(4).get_node().data), np.float32(size**-0.5)
    exact = usual if np.float16(usual) == np.float16(scale) else scale
    attended = op.scaled_dot_product_attention(query, *kept, visible, op.constant(exact))
    merged = _by_heads(attended)
    for back in _readers(attention.output(0), "Transpose"):
        for number in _readers(back.output(0), "Convert"):
            number.output(0).replace(merged.output(0))


# The operations from a rotated value back to what is rotated, in llama.cpp's two orders of the pairs.
_ROTATIONS = (
    ("Add", "Multiply"),
    ("Transpose", "Concat", "Add", "Multiply", "VariadicSplit", "Transpose", "Reshape"),
)


class _Rotary:
    """The rotary embedding in the form that the plugins fuse into one operation."""

    def __init__(self, graph: ov.Model) -> None:
        nodes = {node.friendly_name: node for node in graph.get_ops()}
        if not {"rope_cos", "rope_sin"} <= set(nodes):
            raise ConversionFailed("the graph has no rotary embedding")
        self._cos, self._sin = (_by_heads(op.concat([nodes[name]] * 2, 3)) for name in ("rope_cos", "rope_sin"))

    def turn(self, rotated: Output) -> Node:
        """[batch, heads, tokens, size] of the front end's rotation, [batch, tokens, heads, size]."""
        for kinds in _ROTATIONS:
            value = rotated
            for kind in kinds:
                if value.get_node().get_type_name() != kind:
                    break
                value = value.get_node().input_value(0)
            else:
                break
        else:
            raise ConversionFailed(f"{rotated.get_node().friendly_name} is not a rotary embedding that is supported")
        x = _by_heads(value)
        half = x.get_output_partial_shape(0)[3].get_length() // 2
        # To the end, not to the size: the fusion looks for that.
        low, high = (
            op.slice(x, *(i64(bound) for bound in (first, last, 1, 3)))
            for first, last in ((0, half), (half, np.iinfo(np.int64).max))
        )
        swapped = op.concat([op.multiply(high, np.full((1, 1, 1, 1), -1, np.float32)), low], -1)
        return op.add(op.multiply(x, self._cos), op.multiply(swapped, self._sin))


def _visible(ids: Node, mask: Node) -> Node:
    """The attention mask, f32 [batch, 1, tokens, tokens and past]: hides padding and later tokens."""
    total, length = (op.gather(op.shape_of(node), op.constant(np.int64(1)), _axis(0)) for node in (mask, ids))
    one = op.constant(np.int64(1))
    columns = op.unsqueeze(op.range(_axis(0), total, one, "i64"), i64(0))
    rows = op.unsqueeze(op.range(op.subtract(total, length), total, one, "i64"), i64(1))
    earlier = op.unsqueeze(op.less_equal(columns, rows), i64(0, 1))
    allowed = op.logical_and(earlier, op.unsqueeze(op.convert(mask, "boolean"), i64(1, 2)))
    # Finite: a row of −inf only would give NaN.
    return op.select(allowed, op.constant(np.float32(0)), op.constant(np.float32(-65504)))


_THROUGH = frozenset({"Convert", "Reshape", "Transpose", "Broadcast", "Unsqueeze", "Concat"})
_AFTER_HEAD = frozenset({"Multiply", "Divide", "Tanh", "Add", "Convert"})


def _back(output: Output, kind: str, through: frozenset[str] = _THROUGH) -> Node:
    """The node of that kind which an output comes from, through operations of other kinds."""
    node = output.get_node()
    while node.get_type_name() != kind:
        if node.get_type_name() not in through:
            raise ConversionFailed(
                f"the graph has {node.friendly_name}, a {node.get_type_name()}, where {kind} is expected"
            )
        node = node.input_value(0).get_node()
    return node


def _by_heads(value: Node | Output) -> Node:
    """[batch, tokens, heads, size] as [batch, heads, tokens, size], and back."""
    return op.transpose(value, i64(0, 2, 1, 3))


def _readers(output: Output, kind: str) -> Iterator[Node]:
    found = [port.get_node() for port in output.get_target_inputs()]
    return (node for node in found if node.get_type_name() == kind)


def _axis(value: int) -> Node:
    return op.constant(np.int64(value))
