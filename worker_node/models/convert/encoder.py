"""What embedding models and rerankers of the BERT family share: configuration, graph, weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node, Output
from openvino import opset13 as op
from safetensors import SafetensorError, deserialize
from tokenizers import Encoding, Tokenizer

from worker_node.core.errors import ConversionFailed
from worker_node.models.directory import read_json
from worker_node.models.sources import SAFETENSORS_FILE, weight_files

# The names by which engines know the encoder's ports.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)

Tensors = dict[str, NDArray[np.float32]]


def i64(*values: int) -> Node:
    return op.constant(np.array(values, dtype=np.int64))


def name_port(output: Output, name: str) -> None:
    output.get_node().set_friendly_name(name)
    output.set_names({name})


# The names that Hugging Face configurations use, and OpenVINO's approximation mode of Gelu for each.
GELU_MODES = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class BertConfig(msgspec.Struct, frozen=True):
    """`config.json`: the sizes of the encoder. Absent options have the defaults of transformers."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    architectures: tuple[str, ...] | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 2
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False


def read_bert_config(source: Path, model_type: str, architectures: Collection[str], what: str) -> BertConfig:
    """Read `config.json`; raises ConversionFailed, naming the option, for other architectures."""
    path = source / "config.json"
    config = read_json(path, BertConfig)
    heads = config.num_attention_heads
    known = {
        "model_type": config.model_type == model_type,
        "architectures": set(config.architectures or ()) <= set(architectures),
        "hidden_act": config.hidden_act in GELU_MODES,
        "position_embedding_type": config.position_embedding_type == "absolute",
        "is_decoder": not config.is_decoder,
        "add_cross_attention": not config.add_cross_attention,
        "num_attention_heads": heads > 0 and config.hidden_size % heads == 0,
    }
    for option, right in known.items():
        if not right:
            raise ConversionFailed(
                f"{path}: {option} = {getattr(config, option)!r} is not known; only {what} "
                f"({', '.join(architectures)}) are"
            )
    return config


class ModelConfig(msgspec.Struct, frozen=True):
    """What `config.json` says of any encoder."""

    max_position_embeddings: int
    model_type: str = "unknown"
    matryoshka_dimensions: tuple[int, ...] | None = None


class _TokenizerLimits(msgspec.Struct, frozen=True):
    model_max_length: float | None = None


def token_limit(source: Path, stated: int | None) -> int:
    """The most tokens of a text: as stated, else the tokenizer's limit, and at most one for each position."""
    positions = read_json(source / "config.json", ModelConfig).max_position_embeddings
    path = source / "tokenizer_config.json"
    if stated is None and path.is_file():
        # Tokenizers without a limit have 1e30 here.
        stated = int(min(read_json(path, _TokenizerLimits).model_max_length or positions, positions))
    return min(stated or positions, positions)


# Added to the attention score of a padding token. exp(-10000) is zero in every float type, and unlike -inf it leaves
# a fully masked row finite, in f16 too.
_MASKED = -10000.0


def text_input(name: str) -> Node:
    port = op.parameter([-1, -1], np.int64)
    name_port(port.output(0), name)
    return port


def hidden_states(
    bert: BertConfig,
    weights: Weights,
    ids: Node,
    present: Node,
    *,
    types: Node | None = None,
    prefix: str = "",
    first_position: int = 0,
) -> Node:
    """Token vectors, f32 [batch, length, hidden], of token ids under a mask (`present`, f32 [batch, length]).

    Without `types` all tokens are of type 0. The tensors' names begin with `prefix`; `first_position` is that of the
    first token. Raises ConversionFailed as `Weights`.
    """
    absent = op.multiply(op.subtract(np.float32(1.0), present), np.float32(_MASKED))
    attention_mask = op.unsqueeze(absent, i64(1, 2))
    hidden = _embeddings(bert, weights, ids, types, prefix, first_position)
    for layer in range(bert.num_hidden_layers):
        hidden = _layer(bert, weights, f"{prefix}encoder.layer.{layer}", hidden, attention_mask)
    return hidden


class Weights:
    """The tensors by name, but for `unused` ones; knows which have been asked for."""

    def __init__(self, tensors: Tensors, unused: frozenset[str]) -> None:
        self._tensors = tensors
        self._left = set(tensors) - unused

    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]:
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise ConversionFailed(f"the weights have no tensor {name}") from error
        if tensor.shape != shape:
            raise ConversionFailed(f"tensor {name} has shape {tensor.shape}, its configuration says {shape}")
        self._left.discard(name)
        return tensor

    def expect_all_used(self) -> None:
        """Raise ConversionFailed if tensors are left over: the model is another than was built."""
        if self._left:
            raise ConversionFailed(f"tensors that the network has no place for: {', '.join(sorted(self._left)[:8])}")


def linear(weights: Weights, name: str, x: Node, rows: int, columns: int, *, bias: bool = True) -> Node:
    """A fully connected layer to `rows` numbers, over the last axis of `x`, which has `columns`."""
    product = op.matmul(x, weights(f"{name}.weight", rows, columns), False, True)
    return op.add(product, weights(f"{name}.bias", rows)) if bias else product


def layer_norm(weights: Weights, name: str, x: Node, size: int, epsilon: float) -> Node:
    """Normalise the last axis of `x`, [batch, length, size], then scale and shift."""
    normal = op.mvn(x, i64(-1), True, epsilon, "INSIDE_SQRT")
    scaled = op.multiply(normal, weights(f"{name}.weight", size).reshape(1, 1, size))
    return op.add(scaled, weights(f"{name}.bias", size).reshape(1, 1, size))


def split_heads(x: Node, heads: int, size: int) -> Node:
    """[batch, length, size] to [batch, heads, length, size / heads]."""
    return op.transpose(op.reshape(x, i64(0, 0, heads, size // heads), special_zero=True), i64(0, 2, 1, 3))


def merge_heads(x: Node, size: int) -> Node:
    """[batch, heads, length, size / heads] to [batch, length, size]."""
    return op.reshape(op.transpose(x, i64(0, 2, 1, 3)), i64(0, 0, size), special_zero=True)


def _embeddings(
    config: BertConfig, weights: Weights, ids: Node, types: Node | None, prefix: str, first_position: int
) -> Node:
    size, name = config.hidden_size, f"{prefix}embeddings"
    words = weights(f"{name}.word_embeddings.weight", config.vocab_size, size)
    positions = weights(f"{name}.position_embeddings.weight", config.max_position_embeddings, size)[first_position:]
    rows = weights(f"{name}.token_type_embeddings.weight", config.type_vocab_size, size)
    length = op.gather(op.shape_of(ids), i64(1), i64(0))
    if types is None:
        # Every token is of type 0: its row joins the positions once and for all.
        positions = positions + rows[0]
    places = op.slice(op.constant(positions), i64(0), length, i64(1), i64(0))
    total = op.add(op.gather(op.constant(words), ids, i64(0)), op.unsqueeze(places, i64(0)))
    if types is not None:
        total = op.add(total, op.gather(op.constant(rows), types, i64(0)))
    return layer_norm(weights, f"{name}.LayerNorm", total, size, config.layer_norm_eps)


def _layer(config: BertConfig, weights: Weights, name: str, x: Node, mask: Node) -> Node:
    size, inner, epsilon = config.hidden_size, config.intermediate_size, config.layer_norm_eps
    query, key, value = (
        split_heads(linear(weights, f"{name}.attention.self.{part}", x, size, size), config.num_attention_heads, size)
        for part in ("query", "key", "value")
    )
    attended = op.scaled_dot_product_attention(query, key, value, mask)
    projected = linear(weights, f"{name}.attention.output.dense", merge_heads(attended, size), size, size)
    x = layer_norm(weights, f"{name}.attention.output.LayerNorm", op.add(projected, x), size, epsilon)
    wide = op.gelu(linear(weights, f"{name}.intermediate.dense", x, inner, size), GELU_MODES[config.hidden_act])
    narrow = linear(weights, f"{name}.output.dense", wide, size, inner)
    return layer_norm(weights, f"{name}.output.LayerNorm", op.add(narrow, x), size, epsilon)


_FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# Checkpoints that began in TensorFlow call the scale and shift of a layer norm so.
_LAYER_NORM = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def read_tensors(source: Path) -> Tensors:
    """All floating-point tensors of the safetensors files by name, as float32. Raises ConversionFailed."""
    files = weight_files(source)
    if not files:
        raise ConversionFailed(f"{source}: {SAFETENSORS_FILE} is missing, or one of its shards")
    return {name: tensor for file in files for name, tensor in _read_tensors(file).items()}


def _read_tensors(path: Path) -> Tensors:
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise ConversionFailed(f"{path}: not a readable safetensors file ({error})") from error
    result: Tensors = {}
    for published, tensor in tensors:
        old = next((old for old in _LAYER_NORM if published.endswith(old)), "")
        name = published.removesuffix(old) + _LAYER_NORM.get(old, "")
        dtype, shape, data = tensor["dtype"], tensor["shape"], tensor["data"]
        if dtype == "BF16":
            widened = np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16
            result[name] = widened.view(np.float32).reshape(shape)
        elif dtype in _FLOATS:
            result[name] = np.frombuffer(data, dtype=_FLOATS[dtype]).astype(np.float32).reshape(shape)
        elif dtype.startswith("F"):
            raise ConversionFailed(f"{path}: tensor {name} has type {dtype}, which is not known")
    return result


def write_tokenizer(source: Path, target: Path, rows: int | None) -> tuple[Tokenizer, str]:
    """Copy a tokenizer as `read_tokenizer` reads it; returns it and its hash (sha256)."""
    tokenizer, canonical = read_tokenizer(source, rows)
    target.write_text(canonical, encoding="utf-8")
    return tokenizer, hashlib.sha256(canonical.encode()).hexdigest()


def read_tokenizer(source: Path, rows: int | None = None) -> tuple[Tokenizer, str]:
    """The tokenizer without truncation and padding, and its text. Raises ConversionFailed for ids beyond `rows`."""
    try:
        content = json.loads(source.read_bytes())
        content["truncation"] = content["padding"] = None
        canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        tokenizer = Tokenizer.from_str(canonical)
    except Exception as error:
        # The tokenizers library raises plain Exception for what it cannot read.
        raise ConversionFailed(f"{source}: not a readable tokenizer ({error})") from error
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if rows is not None and largest >= rows:
        raise ConversionFailed(
            f"{source}: token {token!r} has the id {largest}, and the model has vectors for the ids below {rows}; "
            "take the tokenizer that the model was trained with"
        )
    return tokenizer, canonical


def token_rows(model: ov.Model) -> int | None:
    """The rows of the matrix in which a graph looks up its `input_ids`; None where it is not found."""
    ports = list(model.input(INPUT_IDS).get_target_inputs())
    for port in ports:
        node = port.get_node()
        if node.get_type_name() == "Gather" and port.get_index() == 1:
            rows = node.get_input_partial_shape(0)[0]
            return rows.get_length() if rows.is_static else None
        if node.get_type_name() in {"Convert", "Reshape"}:
            ports += node.output(0).get_target_inputs()
    return None


def outputs_on_cpu(graph: Path, encodings: Iterable[Encoding]) -> NDArray[np.float32]:
    """The outputs for texts, one by one, on the CPU in float32: the reference of every other device."""
    compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"})
    rows = []
    for encoding in encodings:
        values = {INPUT_IDS: encoding.ids, ATTENTION_MASK: encoding.attention_mask, TOKEN_TYPES: encoding.type_ids}
        inputs = {port.any_name: np.array([values[port.any_name]], np.int64) for port in compiled.inputs}
        rows.append(compiled(inputs)[0][0].copy())
    return np.stack(rows)
