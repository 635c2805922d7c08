"""Encoders of the BERT family as one OpenVINO graph, from token ids to the finished vector."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node, Output
from openvino import opset13 as op
from safetensors import SafetensorError, deserialize
from tokenizers import Encoding, Tokenizer

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.job import ConversionJob
from worker_node.models.directory import TOKENIZER_FILE
from worker_node.models.sources.selection import SAFETENSORS_FILE, weight_files

# The names by which engines know the encoder's ports.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)
EMBEDDING = "embedding"

# What sentence-transformers divides by at least: the number of tokens (mean pooling) and the norm of the vector.
_MIN_TOKENS = 1e-9
_MIN_NORM = 1e-12


class Pooling(StrEnum):
    """How the token vectors of a text become one vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


def i64(*values: int) -> Node:
    """A constant shape, axis list or index list."""
    return op.constant(np.array(values, dtype=np.int64))


def name_port(output: Output, name: str) -> None:
    """Give a port the one name by which it is asked for."""
    output.get_node().set_friendly_name(name)
    output.set_names({name})


def pool(hidden: Node | Output, mask: Node, pooling: Pooling, *, normalise: bool) -> Node:
    """The vectors, f32 [batch, size], of token vectors, f32 [batch, length, size], under a mask, i64 [batch, length].

    A text without any token gives zeros (mean, last), never NaN. Tokens are counted in integers: devices compute
    floats in less than f32, and in bf16, 256 and 1 is 256.
    """
    if pooling is Pooling.CLS:
        vector = op.gather(hidden, op.constant(np.int64(0)), op.constant(np.int64(1)))
    elif pooling is Pooling.LAST:
        # Wherever the padding is: the token up to which the mask has summed up to all of it.
        counted = op.convert(mask, "i32")
        end = op.equal(op.cum_sum(counted, op.constant(np.int64(1))), op.reduce_sum(counted, i64(1), keep_dims=True))
        last = op.multiply(op.convert(end, "f32"), op.convert(mask, "f32"))
        vector = op.reduce_sum(op.multiply(hidden, op.unsqueeze(last, i64(2))), i64(1), keep_dims=False)
    else:
        weights = op.unsqueeze(op.convert(mask, "f32"), i64(2))
        total = op.reduce_sum(op.multiply(hidden, weights), i64(1), keep_dims=False)
        counted = op.reduce_sum(op.convert(mask, "i32"), i64(1), keep_dims=True)
        tokens = op.maximum(op.convert(counted, "f32"), np.float32(_MIN_TOKENS))
        vector = op.divide(total, tokens)
    return op.normalize_l2(vector, i64(1), _MIN_NORM**2, "max") if normalise else vector


def finish(vector: Node, parameters: list[Node]) -> ov.Model:
    """The model that ends in `vector`, with its output named as engines expect it."""
    name_port(vector.output(0), EMBEDDING)
    return ov.Model([op.result(vector)], parameters, "sentence_encoder")


_T = TypeVar("_T")

# The names that Hugging Face configurations use, and OpenVINO's approximation mode of Gelu for each.
GELU_MODES = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


_POOLING_NAMES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
}


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

    @property
    def gelu_mode(self) -> str:
        """OpenVINO's approximation mode for the activation."""
        return GELU_MODES[self.hidden_act]


class SentenceConfig(msgspec.Struct, frozen=True):
    """What follows the encoder, and how many tokens it was made for."""

    pooling: Pooling
    normalise: bool
    max_tokens: int

    @property
    def layout(self) -> str:
        """Both in words, as part of the name of the vector space."""
        return f"{self.pooling}, {'normalised' if self.normalise else 'as it is'}"


class _Module(msgspec.Struct, frozen=True):
    path: str
    type: str


class _SentenceBert(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _SentenceTransformers(msgspec.Struct, frozen=True):
    default_prompt_name: str | None = None


# Checkpoints of a BertModel, alone or under the heads of its pre-training, which an encoder drops.
_ENCODERS = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
_PREFIX, _HEADS = "bert.", "cls."


def read_bert_config(
    directory: Path,
    model_type: str = "bert",
    architectures: Collection[str] = _ENCODERS,
    what: str = "plain BERT encoders",
) -> BertConfig:
    """Read `config.json`; raises ConversionFailed, naming the option, for other architectures than these (`what`)."""
    path = directory / "config.json"
    config = read_json(path, BertConfig)
    demands = {
        "model_type": (config.model_type, config.model_type == model_type),
        "architectures": (config.architectures, set(config.architectures or ()) <= set(architectures)),
        "hidden_act": (config.hidden_act, config.hidden_act in GELU_MODES),
        "position_embedding_type": (config.position_embedding_type, config.position_embedding_type == "absolute"),
        "is_decoder": (config.is_decoder, not config.is_decoder),
        "add_cross_attention": (config.add_cross_attention, not config.add_cross_attention),
        "num_attention_heads": (
            config.num_attention_heads,
            config.num_attention_heads > 0 and config.hidden_size % config.num_attention_heads == 0,
        ),
    }
    for option, (value, known) in demands.items():
        if not known:
            raise ConversionFailed(
                f"{path}: {option} = {value!r} is not known; only {what} ({', '.join(architectures)}) are"
            )
    return config


class _Positions(msgspec.Struct, frozen=True):
    max_position_embeddings: int


class _TokenizerLimits(msgspec.Struct, frozen=True):
    model_max_length: float | None = None


def sentence_config_of(directory: Path, job: ConversionJob) -> SentenceConfig:
    """What follows the encoder, from the directory's files, or from the job where they do not specify it.

    Raises ConversionFailed when neither does, when they contradict each other, or for what is not known.
    """
    if (directory / "modules.json").is_file():
        found = read_sentence_config(directory)
        if job.pooling not in (None, found.pooling) or job.normalize not in (None, found.normalise):
            raise ConversionFailed(
                f"{directory / 'modules.json'}: vectors are {found.layout} by these files; remove pooling and normalize"
            )
        return found
    if job.pooling is None:
        known = " or ".join(f'"{pooling}"' for pooling in Pooling)
        raise ConversionFailed(
            f"{directory}: no modules.json says how token vectors become one vector; set pooling = {known}"
        )
    return SentenceConfig(Pooling(job.pooling), job.normalize is not False, token_limit(directory, None))


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the modules that sentence-transformers would run after the encoder.

    Raises ConversionFailed, naming the file and the option, when there are none or one is not known.
    """
    modules = read_json(directory / "modules.json", tuple[_Module, ...])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConversionFailed(
            f"{directory / 'modules.json'}: the chain of modules {kinds} is not known; "
            "known are Transformer, Pooling and, after these, Normalize"
        )
    path = directory / "sentence_bert_config.json"
    limits = read_json(path, _SentenceBert) if path.is_file() else _SentenceBert()
    if limits.do_lower_case and not _lowers(read_tokenizer(directory / TOKENIZER_FILE)[0]):
        raise ConversionFailed(f"{path}: do_lower_case is set and {TOKENIZER_FILE} keeps upper case; let it lower-case")
    prompts = directory / "config_sentence_transformers.json"
    if prompts.exists() and read_json(prompts, _SentenceTransformers).default_prompt_name is not None:
        raise ConversionFailed(f"{prompts}: default_prompt_name is not known")
    return SentenceConfig(
        pooling=_read_pooling(directory / modules[1].path / "config.json"),
        normalise="Normalize" in kinds,
        max_tokens=token_limit(directory, limits.max_seq_length),
    )


def token_limit(directory: Path, stated: int | None) -> int:
    """The most tokens of a text: as stated, else what the tokenizer says, and never more than there are positions."""
    positions = read_json(directory / "config.json", _Positions).max_position_embeddings
    path = directory / "tokenizer_config.json"
    if stated is None and path.is_file():
        # Tokenizers without a limit have 1e30 here.
        stated = int(min(read_json(path, _TokenizerLimits).model_max_length or positions, positions))
    return min(stated or positions, positions)


def read_json(path: Path, kind: type[_T]) -> _T:
    """Read a JSON file as that type; raises ConversionFailed, naming the file, when it is missing or something else."""
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionFailed(f"{path}: not readable ({error})") from error


def _read_pooling(path: Path) -> Pooling:
    options = read_json(path, dict[str, Any])
    chosen = sorted(name for name, value in options.items() if name.startswith("pooling_mode_") and value is True)
    # Newer versions of sentence-transformers write one name.
    chosen = chosen or [str(options.get("pooling_mode"))]
    if len(chosen) == 1 and chosen[0] in _POOLING_NAMES:
        return _POOLING_NAMES[chosen[0]]
    raise ConversionFailed(
        f"{path}: pooling {chosen} is not known; known are mean_tokens, cls_token and lasttoken, one of them"
    )


# Added to the attention score of a padding token. exp(-10000) is zero in every float type, and unlike -inf it leaves
# a fully masked row finite, in f16 too.
_MASKED = -10000.0
# Tensors that a BertModel carries and a sentence encoder does not use.
_UNUSED = frozenset({"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"})

Tensors = dict[str, NDArray[np.float32]]


def build_encoder(bert: BertConfig, sentence: SentenceConfig, tensors: Tensors) -> ov.Model:
    """Build the graph.

    Inputs `input_ids` and `attention_mask`, both i64 [batch, length]; output `embedding`, f32 [batch, dimensions]. The
    shapes are dynamic and may be reshaped to static ones. A row whose mask is all zeros gives no NaN.
    Raises ConversionFailed when a tensor is missing, has another shape than the configuration says, or is left over.
    """
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in tensors) else ""
    heads = {name for name in tensors if prefix and name.startswith(_HEADS)}
    weights = Weights(tensors, frozenset({prefix + name for name in _UNUSED} | heads))
    ids, mask = text_input(INPUT_IDS), text_input(ATTENTION_MASK)
    present = op.convert(mask, "f32")
    hidden = hidden_states(bert, weights, ids, present, prefix=prefix)
    weights.expect_all_used()
    vector = pool(hidden, mask, sentence.pooling, normalise=sentence.normalise)
    return finish(vector, [ids, mask])


def text_input(name: str) -> Node:
    """An input of the graph: i64 [batch, length]."""
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
    first token. Raises ConversionFailed as `build_encoder`.
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
        """The tensor of that name and shape. Raises ConversionFailed."""
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise ConversionFailed(f"the weights have no tensor {name}") from error
        if tensor.shape != shape:
            raise ConversionFailed(f"tensor {name} has shape {tensor.shape}, its configuration says {shape}")
        self._left.discard(name)
        return tensor

    def expect_all_used(self) -> None:
        """Raise ConversionFailed, naming them, if tensors are left over: then this is another model than was built."""
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
    wide = op.gelu(linear(weights, f"{name}.intermediate.dense", x, inner, size), config.gelu_mode)
    narrow = linear(weights, f"{name}.output.dense", wide, size, inner)
    return layer_norm(weights, f"{name}.output.LayerNorm", op.add(narrow, x), size, epsilon)


# The names that models use for their prompts, by what the text is.
_NAMES = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
}


class _Prompts(msgspec.Struct, frozen=True):
    prompts: dict[str, str | None] | None = None


class _Pooling(msgspec.Struct, frozen=True):
    include_prompt: bool = True


class _Sizes(msgspec.Struct, frozen=True):
    matryoshka_dimensions: tuple[int, ...] | None = None


def prompts_of(directory: Path, job: ConversionJob) -> Mapping[str, str]:
    """The texts before a `query` and a `document`: both, or none where the model marks neither.

    A kind without a prompt beside one that has it gets "": its texts go in as they are. A model whose pooling leaves
    the prompt out has none here. Raises ConversionFailed for a damaged file.
    """
    pooling = directory / "1_Pooling" / "config.json"
    if pooling.is_file() and not read_json(pooling, _Pooling).include_prompt:
        return {}
    path = directory / "config_sentence_transformers.json"
    declared = (read_json(path, _Prompts).prompts if path.is_file() else None) or {}
    found = {
        kind: next((prompt for name in names if (prompt := declared.get(name))), "") for kind, names in _NAMES.items()
    }
    # Empty ones are what sentence-transformers writes for a model that declares none.
    if any(found.values()) or job.entry is None:
        return found if any(found.values()) else {}
    return job.entry.prompts


def matryoshka_of(directory: Path, job: ConversionJob, dimensions: int) -> tuple[int, ...]:
    """The sizes, smaller than `dimensions` and ascending, to which vectors may be cut; none where none is declared.

    Raises ConversionFailed for a damaged `config.json`.
    """
    path = directory / "config.json"
    declared = read_json(path, _Sizes).matryoshka_dimensions if path.is_file() else None
    of_catalog = () if job.entry is None else job.entry.matryoshka
    return tuple(sorted({size for size in declared or of_catalog if 0 < size < dimensions}))


_FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# Checkpoints that began in TensorFlow call the scale and shift of a layer norm so.
_LAYER_NORM = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def read_tensors(directory: Path) -> Tensors:
    """All floating-point tensors of a directory's safetensors files by name, as float32; integer ones (buffers) are
    left out.

    Raises ConversionFailed for a damaged file, a missing shard and a float type that is not known.
    """
    files = weight_files(directory)
    if not files:
        raise ConversionFailed(f"{directory}: {SAFETENSORS_FILE} is missing, or one of its shards")
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
    """Copy a tokenizer without its truncation and padding, for a model with `rows` token vectors (None: unknown).

    Returns it and its hash (sha256). Raises ConversionFailed as `read_tokenizer`.
    """
    tokenizer, canonical = read_tokenizer(source, rows)
    target.write_text(canonical, encoding="utf-8")
    return tokenizer, hashlib.sha256(canonical.encode()).hexdigest()


def read_tokenizer(source: Path, rows: int | None = None) -> tuple[Tokenizer, str]:
    """A tokenizer without its truncation and padding, and its canonical form, which does not depend on the layout.

    Raises ConversionFailed when the file is missing, is not a tokenizer, or has token ids beyond the model's `rows`.
    """
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


# Letters of whose lower case tokenizers and Python have one opinion.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ ÀÉÖÜ ДЖШ"


def _lowers(tokenizer: Tokenizer) -> bool:
    normalizer = tokenizer.normalizer
    return normalizer is not None and bool(
        normalizer.normalize_str(_LETTERS) == normalizer.normalize_str(_LETTERS.lower())
    )


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
    """The outputs for some texts, one by one, on the CPU in float32: what every other device is compared with."""
    compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"})
    rows = []
    for encoding in encodings:
        values = {INPUT_IDS: encoding.ids, ATTENTION_MASK: encoding.attention_mask, TOKEN_TYPES: encoding.type_ids}
        inputs = {port.any_name: np.array([values[port.any_name]], np.int64) for port in compiled.inputs}
        rows.append(compiled(inputs)[0][0].copy())
    return np.stack(rows)
