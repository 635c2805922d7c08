"""Makes embedding models of safetensors files, and takes over models that are in OpenVINO form already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
from openvino import Output
from openvino import opset13 as op

from worker_node.core.errors import ConfigurationError, ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    EMBEDDING,
    INPUT_IDS,
    TOKEN_TYPES,
    build_encoder,
    finish,
    matryoshka_of,
    outputs_on_cpu,
    pool,
    prompts_of,
    read_bert_config,
    read_json,
    read_tensors,
    sentence_config_of,
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
    write_canary,
)
from worker_node.models.sources.downloads import file_sha256
from worker_node.models.sources.selection import weight_files

_HEX_DIGITS = 32


def space_fingerprint(*, weights_sha256: str, tokenizer_sha256: str, layout: str, dimensions: int) -> str:
    """A short name (hex) of all that decides where a text's vector lies: vectors of equal names may be compared.

    `layout` is the pooling and normalisation. The device, the precision and the batch are not part of it: they move a
    vector by no more than rounding does.
    """
    facts = {"dimensions": dimensions, "layout": layout, "tokenizer": tokenizer_sha256, "weights": weights_sha256}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_HEX_DIGITS]


def convert_encoder(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Build, save and examine the model; raises ConversionFailed when the files are not sound."""
    source = Path(job.source)
    if job.quantization not in (None, Quantization.F32):
        raise ConversionFailed(
            f"{job.id}: embedding models are built in {Quantization.F32}, not {job.quantization}; for int8 weights "
            "take an export in OpenVINO form (of many models there is a repository that ends in -int8-ov)"
        )
    stage("building the encoder")
    bert, sentence = read_bert_config(source), sentence_config_of(source, job)
    model = build_encoder(bert, sentence, read_tensors(source))
    return finish_embedding_model(
        job,
        model,
        stage,
        family="bert",
        context_limit=min(sentence.max_tokens, bert.max_position_embeddings),
        weights_sha256=" ".join(map(file_sha256, weight_files(source))),
        layout=sentence.layout,
        normalised=sentence.normalise,
    )


def finish_embedding_model(
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
    """Save a graph that ends in `embedding` with its tokenizer, and its reference vectors as the CPU computes them.

    `layout` says in words what follows the weights (pooling, normalisation), as part of the space's name.
    Raises ConversionFailed when the tokenizer is missing or the vectors are not finite, or not of unit length though
    `normalised`.
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
    return Converted(
        kind=ModelKind.EMBEDDING,
        family=family,
        quantization=Quantization.F32,
        context_limit=context_limit,
        dimensions=dimensions,
        space=space_fingerprint(
            weights_sha256=weights_sha256,
            tokenizer_sha256=tokenizer_sha256,
            layout=layout,
            dimensions=dimensions,
        ),
        prompts=prompts_of(Path(job.source), job),
        matryoshka=matryoshka_of(Path(job.source), job, dimensions),
    )


# Of decoders that are used as encoders, as Qwen3-Embedding.
_POSITIONS = "position_ids"
_POOLED = ("sentence_embedding", EMBEDDING)
_HIDDEN = ("last_hidden_state", "token_embeddings")
_LOGITS = "logits"


class _Limits(msgspec.Struct, frozen=True):
    max_position_embeddings: int
    model_type: str = "unknown"


def adopt(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Copy a generation model, or finish an encoder's graph; raises ConversionFailed for what is neither."""
    source = Path(job.source)
    stage("reading the graph")
    try:
        model = ov.Core().read_model(source / MODEL_FILE)
    except RuntimeError as error:
        raise ConversionFailed(f"{source / MODEL_FILE}: OpenVINO cannot read it ({error})") from error
    if _named_output(model, _LOGITS) is not None:
        try:
            return copy_export(job, read_directory(source), stage)
        except ConfigurationError as error:
            raise ConversionFailed(error.message) from error
    return _adopt_encoder(job, source, model, stage)


def _adopt_encoder(job: ConversionJob, source: Path, model: ov.Model, stage: Callable[[str], None]) -> Converted:
    weights_sha256 = file_sha256((source / MODEL_FILE).with_suffix(".bin"))
    limits = read_json(source / "config.json", _Limits)
    max_tokens, layout, normalised = limits.max_position_embeddings, "as the graph has it", False
    pooled = next((found for name in _POOLED if (found := _named_output(model, name)) is not None), None)
    hidden = next((found for name in _HIDDEN if (found := _named_output(model, name)) is not None), None)
    parameters = _text_inputs(job, model)
    if pooled is not None:
        if (job.pooling, job.normalize) != (None, None):
            raise ConversionFailed(f"{source / MODEL_FILE}: the graph pools by itself; remove pooling and normalize")
        finished = finish(pooled.get_node(), parameters)
    elif hidden is not None:
        sentence = sentence_config_of(source, job)
        max_tokens = min(max_tokens, sentence.max_tokens)
        normalised = sentence.normalise
        layout = sentence.layout
        finished = finish(pool(hidden, parameters[1], sentence.pooling, normalise=normalised), parameters)
    else:
        outputs = ", ".join(name for port in model.outputs for name in port.names) or "nameless ones"
        raise ConversionFailed(
            f"{source / MODEL_FILE}: has the outputs {outputs}; known are {_LOGITS} (a generation model), "
            f"{', '.join(_POOLED + _HIDDEN)} (an encoder)"
        )
    return finish_embedding_model(
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
    """The two inputs that are fed; token types, always 0 for a single text, and positions become part of the graph."""
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
