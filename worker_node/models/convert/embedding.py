"""Makes embedding models of safetensors files, and takes over models that are in OpenVINO form already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    INPUT_IDS,
    TOKEN_TYPES,
    BertConfig,
    ModelConfig,
    Tensors,
    Weights,
    hidden_states,
    i64,
    name_port,
    outputs_on_cpu,
    read_bert_config,
    read_tensors,
    read_tokenizer,
    text_input,
    token_limit,
    token_rows,
    write_tokenizer,
)
from worker_node.models.convert.job import ConversionJob, Converted, copy_export
from worker_node.models.directory import (
    CANARY_TEXTS,
    MODEL_FILE,
    TOKENIZER_FILE,
    EmbeddingCanary,
    read_directory,
    read_json,
    write_canary,
)
from worker_node.models.downloads import file_sha256
from worker_node.models.sources import weight_files

EMBEDDING = "embedding"
"""The name of a graph's output, by which engines know it."""


class Pooling(StrEnum):
    """How the token vectors of a text become one vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


_POOLING_NAMES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
}


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
    prompts: dict[str, str | None] | None = None


def _sentence_transformers(directory: Path) -> _SentenceTransformers:
    path = directory / "config_sentence_transformers.json"
    return read_json(path, _SentenceTransformers) if path.is_file() else _SentenceTransformers()


def _sentence_config_of(directory: Path, job: ConversionJob) -> SentenceConfig:
    """What follows the encoder, from the directory's files, or from the job where they do not specify it.

    Raises ConversionFailed when neither does, or when they contradict each other.
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


# Letters of whose lower case tokenizers and Python have one opinion.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ ÀÉÖÜ ДЖШ"


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the modules that sentence-transformers would run after the encoder. Raises ConversionFailed."""
    modules = read_json(directory / "modules.json", tuple[_Module, ...])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConversionFailed(
            f"{directory / 'modules.json'}: the chain of modules {kinds} is not known; "
            "known are Transformer, Pooling and, after these, Normalize"
        )

    path = directory / "sentence_bert_config.json"
    limits = read_json(path, _SentenceBert) if path.is_file() else _SentenceBert()
    if limits.do_lower_case:
        normalizer = read_tokenizer(directory / TOKENIZER_FILE)[0].normalizer
        if normalizer is None or normalizer.normalize_str(_LETTERS) != normalizer.normalize_str(_LETTERS.lower()):
            raise ConversionFailed(
                f"{path}: do_lower_case is set and {TOKENIZER_FILE} keeps upper case; let it lower-case"
            )
    if _sentence_transformers(directory).default_prompt_name is not None:
        raise ConversionFailed(f"{directory / 'config_sentence_transformers.json'}: default_prompt_name is not known")
    path = directory / modules[1].path / "config.json"
    options = read_json(path, dict[str, Any])
    chosen = sorted(name for name, value in options.items() if name.startswith("pooling_mode_") and value is True)
    # Newer versions of sentence-transformers write one name.
    chosen = chosen or [str(options.get("pooling_mode"))]
    if len(chosen) != 1 or chosen[0] not in _POOLING_NAMES:
        raise ConversionFailed(
            f"{path}: pooling {chosen} is not known; known are mean_tokens, cls_token and lasttoken, one of them"
        )
    return SentenceConfig(
        pooling=_POOLING_NAMES[chosen[0]],
        normalise="Normalize" in kinds,
        max_tokens=token_limit(directory, limits.max_seq_length),
    )


# The names that models use for their prompts, by what the text is.
_PROMPT_NAMES = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
}


def prompts_of(directory: Path, job: ConversionJob) -> Mapping[str, str]:
    """The texts before a `query` and a `document`: both, or none where the model marks neither.

    A kind without a prompt beside one that has it gets "": its texts go in as they are. A model whose pooling leaves
    the prompt out has none here.
    """
    pooling = directory / "1_Pooling" / "config.json"
    if pooling.is_file() and read_json(pooling, dict[str, Any]).get("include_prompt") is False:
        return {}
    declared = _sentence_transformers(directory).prompts or {}
    found = {
        kind: next((prompt for name in names if (prompt := declared.get(name))), "")
        for kind, names in _PROMPT_NAMES.items()
    }
    # Empty ones are what sentence-transformers writes for a model that declares none.
    if any(found.values()):
        return found
    return {} if job.entry is None else job.entry.prompts


def matryoshka_of(directory: Path, job: ConversionJob, dimensions: int) -> tuple[int, ...]:
    """The sizes below `dimensions`, ascending, to which vectors may be cut."""
    declared = read_json(directory / "config.json", ModelConfig).matryoshka_dimensions
    of_catalog = () if job.entry is None else job.entry.matryoshka
    return tuple(sorted({size for size in declared or of_catalog if 0 < size < dimensions}))


# Checkpoints of a BertModel, alone or under the heads of its pre-training, which an encoder drops.
_ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
_PREFIX, _HEADS = "bert.", "cls."
# Tensors that a BertModel carries and a sentence encoder does not use.
_UNUSED = frozenset({"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"})
# What sentence-transformers divides by at least: the number of tokens (mean pooling) and the norm of the vector.
_MIN_TOKENS = 1e-9
_MIN_NORM = 1e-12


def read_encoder_config(directory: Path) -> BertConfig:
    return read_bert_config(directory, "bert", _ARCHITECTURES, "plain BERT encoders")


def check_encoder(directory: Path) -> None:
    """Raise ConversionFailed for what the small files of an encoder show that cannot be converted."""
    config = read_encoder_config(directory)
    read_sentence_config(directory)
    read_tokenizer(directory / TOKENIZER_FILE, config.vocab_size)


def convert_encoder(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    source = Path(job.source)
    if job.quantization not in (None, Quantization.F32):
        raise ConversionFailed(
            f"{job.id}: embedding models are built in {Quantization.F32}, not {job.quantization}; for int8 weights "
            "take an export in OpenVINO form (of many models there is a repository that ends in -int8-ov)"
        )

    stage("building the encoder")
    bert, sentence = read_encoder_config(source), _sentence_config_of(source, job)
    model = build_encoder(bert, sentence, read_tensors(source))
    return _finish_model(
        job,
        model,
        stage,
        family="bert",
        context_limit=min(sentence.max_tokens, bert.max_position_embeddings),
        weights_sha256=" ".join(map(file_sha256, weight_files(source))),
        layout=sentence.layout,
        normalised=sentence.normalise,
    )


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
    hidden = hidden_states(bert, weights, ids, op.convert(mask, "f32"), prefix=prefix)
    weights.expect_all_used()
    return _finish_graph(pool(hidden, mask, sentence.pooling, normalise=sentence.normalise), [ids, mask])


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


def _finish_graph(vector: Node, parameters: list[Node]) -> ov.Model:
    name_port(vector.output(0), EMBEDDING)
    return ov.Model([op.result(vector)], parameters, "sentence_encoder")


_HEX_DIGITS = 32


def _finish_model(
    job: ConversionJob,
    model: ov.Model,
    stage: Callable[[str], None],
    *,
    family: str,
    context_limit: int,
    weights_sha256: str,
    layout: str,
    normalised: bool,
) -> Converted:
    """Save a graph that ends in `embedding` with its tokenizer and its reference vectors, computed on the CPU.

    `layout`, pooling and normalisation in words, is part of the space's name.
    Raises ConversionFailed for a missing tokenizer, and vectors that are not finite or not of unit length.
    """
    target = Path(job.target)
    # Exact weights: rounded to f16 they would be read no faster, for the CPU widens them when it compiles.
    ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    tokenizer, tokenizer_sha256 = write_tokenizer(
        Path(job.source) / TOKENIZER_FILE, target / TOKENIZER_FILE, token_rows(model)
    )

    stage("computing reference vectors")
    vectors = outputs_on_cpu(target / MODEL_FILE, map(tokenizer.encode, CANARY_TEXTS))
    norms = np.linalg.norm(vectors, axis=1)
    if not np.isfinite(vectors).all() or (normalised and not np.allclose(norms, 1.0, atol=1e-4)):
        raise ConversionFailed(f"{job.id}: the encoder made of these files gives vectors that are not sound")
    rows = tuple(tuple(float(x) for x in vector) for vector in vectors)
    write_canary(target, EmbeddingCanary(CANARY_TEXTS, rows))
    dimensions = vectors.shape[1]
    # A short name of all that decides where a text's vector lies: vectors of equal names may be compared. The device,
    # the precision and the batch are not part of it: they move a vector by no more than rounding does.
    facts = {"dimensions": dimensions, "layout": layout, "tokenizer": tokenizer_sha256, "weights": weights_sha256}
    space = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_HEX_DIGITS]
    return Converted(
        kind=ModelKind.EMBEDDING,
        family=family,
        quantization=Quantization.F32,
        context_limit=context_limit,
        dimensions=dimensions,
        space=space,
        prompts=prompts_of(Path(job.source), job),
        matryoshka=matryoshka_of(Path(job.source), job, dimensions),
    )


# Of decoders that are used as encoders, as Qwen3-Embedding.
_POSITIONS = "position_ids"
_POOLED = ("sentence_embedding", EMBEDDING)
_HIDDEN = ("last_hidden_state", "token_embeddings")
_LOGITS = "logits"


def adopt(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    source = Path(job.source)
    stage("reading the graph")
    try:
        model = ov.Core().read_model(source / MODEL_FILE)
    except RuntimeError as error:
        raise ConversionFailed(f"{source / MODEL_FILE}: OpenVINO cannot read it ({error})") from error
    if _named_output(model, _LOGITS) is not None:
        return copy_export(job, read_directory(source), stage)
    return _adopt_encoder(job, source, model, stage)


def _adopt_encoder(job: ConversionJob, source: Path, model: ov.Model, stage: Callable[[str], None]) -> Converted:
    weights_sha256 = file_sha256((source / MODEL_FILE).with_suffix(".bin"))
    limits = read_json(source / "config.json", ModelConfig)
    max_tokens, layout, normalised = limits.max_position_embeddings, "as the graph has it", False
    pooled = next((found for name in _POOLED if (found := _named_output(model, name)) is not None), None)
    hidden = next((found for name in _HIDDEN if (found := _named_output(model, name)) is not None), None)
    parameters = _text_inputs(job, model)
    if pooled is not None:
        if (job.pooling, job.normalize) != (None, None):
            raise ConversionFailed(f"{source / MODEL_FILE}: the graph pools by itself; remove pooling and normalize")
        finished = _finish_graph(pooled.get_node(), parameters)
    elif hidden is not None:
        sentence = _sentence_config_of(source, job)
        max_tokens = min(max_tokens, sentence.max_tokens)
        normalised = sentence.normalise
        layout = sentence.layout
        finished = _finish_graph(pool(hidden, parameters[1], sentence.pooling, normalise=normalised), parameters)
    else:
        outputs = ", ".join(name for port in model.outputs for name in port.names) or "nameless ones"
        raise ConversionFailed(
            f"{source / MODEL_FILE}: has the outputs {outputs}; known are {_LOGITS} (a generation model), "
            f"{', '.join(_POOLED + _HIDDEN)} (an encoder)"
        )
    return _finish_model(
        job,
        finished,
        stage,
        family=limits.model_type,
        context_limit=max_tokens,
        weights_sha256=weights_sha256,
        layout=layout,
        normalised=normalised,
    )


def _named_output(model: ov.Model, name: str) -> Output | None:
    for port in model.outputs:
        if name in port.names:
            return port.get_node().input_value(0)
    return None


def _text_inputs(job: ConversionJob, model: ov.Model) -> list[ov.op.Parameter]:
    """The two inputs that are fed; token types (0 for a single text) and positions join the graph."""
    found = {name: port.get_node() for port in model.inputs for name in port.names}
    unknown = sorted(set(found) - {INPUT_IDS, ATTENTION_MASK, TOKEN_TYPES, _POSITIONS})
    if unknown or INPUT_IDS not in found or ATTENTION_MASK not in found:
        raise ConversionFailed(
            f"{job.id}: the encoder has the inputs {', '.join(sorted(found))}; known are {INPUT_IDS}, "
            f"{ATTENTION_MASK} and, beside these, {TOKEN_TYPES} and {_POSITIONS}"
        )
    if (types := found.get(TOKEN_TYPES)) is not None:
        zeros = op.broadcast(op.constant(np.int64(0)), op.shape_of(found[INPUT_IDS]))
        types.output(0).replace(zeros.output(0))
    if (positions := found.get(_POSITIONS)) is not None:
        # Texts are padded at their end, where no token of theirs looks.
        zero = op.constant(np.int64(0))
        length = op.gather(op.shape_of(found[INPUT_IDS]), op.constant(np.int64(1)), zero)
        counted = op.range(zero, length, op.constant(np.int64(1)), "i64")
        positions.output(0).replace(op.broadcast(counted, op.shape_of(found[INPUT_IDS])).output(0))
    return [found[INPUT_IDS], found[ATTENTION_MASK]]
