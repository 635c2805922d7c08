"""Takes over a model that is in OpenVINO form already, as optimum exports it or a hub publishes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
from openvino import Output
from openvino import opset13 as op

from worker_node.core.errors import ConfigurationError, ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.convert.embedding import finish_embedding_model
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    EMBEDDING,
    INPUT_IDS,
    finish,
    pool,
    read_json,
    sentence_config_of,
)
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.directory import read_directory
from worker_node.models.manifest import MODEL_FILE
from worker_node.models.sources.packages import file_sha256

_SEGMENTS = "token_type_ids"
# Of decoders that are used as encoders, as Qwen3-Embedding.
_POSITIONS = "position_ids"
_POOLED = ("sentence_embedding", EMBEDDING)
_HIDDEN = ("last_hidden_state", "token_embeddings")
_LOGITS = "logits"
_WANTED_SUFFIXES = frozenset({".xml", ".bin", ".json", ".jinja"})


class _Limits(msgspec.Struct, frozen=True):
    max_position_embeddings: int
    model_type: str = "unknown"


def adopt(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Copy a generation model, or finish an encoder's graph; raises ConversionFailed for what is neither."""
    source = Path(job.source)
    if job.quantization is not None and job.kind is None:
        raise ConversionFailed(f"{job.id}: the weights are compressed already; leave the quantization out")
    stage("reading the graph")
    try:
        model = ov.Core().read_model(source / MODEL_FILE)
    except RuntimeError as error:
        raise ConversionFailed(f"{source / MODEL_FILE}: OpenVINO cannot read it ({error})") from error
    if _output(model, _LOGITS) is not None:
        return _adopt_generation(job, source, stage)
    return _adopt_encoder(job, source, model, stage)


def _adopt_generation(job: ConversionJob, source: Path, stage: Callable[[str], None]) -> Converted:
    try:
        known = read_directory(source)
    except ConfigurationError as error:
        raise ConversionFailed(error.message) from error
    stage("copying the files")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _WANTED_SUFFIXES:
            # shutil.move would keep a link; what is not ours to move is copied.
            (shutil.move if job.movable else shutil.copyfile)(path, Path(job.target) / path.name)
    return Converted(
        kind=ModelKind.GENERATION,
        family=known.family,
        quantization=known.quantization,
        context_limit=known.context_limit,
        canary=job.canary,
    )


def _adopt_encoder(job: ConversionJob, source: Path, model: ov.Model, stage: Callable[[str], None]) -> Converted:
    weights_sha256 = file_sha256((source / MODEL_FILE).with_suffix(".bin"))
    limits = read_json(source / "config.json", _Limits)
    max_tokens, layout, normalised = limits.max_position_embeddings, "as the graph has it", False
    pooled = next((found for name in _POOLED if (found := _output(model, name)) is not None), None)
    hidden = next((found for name in _HIDDEN if (found := _output(model, name)) is not None), None)
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


def _output(model: ov.Model, name: str) -> Output | None:
    for port in model.outputs:
        if name in port.names:
            return port.get_node().input_value(0)
    return None


def _text_inputs(job: ConversionJob, model: ov.Model) -> list[ov.op.Parameter]:
    """The two inputs that are fed; token types, always 0 for a single text, and positions become part of the graph."""
    found = {name: port.get_node() for port in model.inputs for name in port.names}
    unknown = sorted(set(found) - {INPUT_IDS, ATTENTION_MASK, _SEGMENTS, _POSITIONS})
    if unknown or INPUT_IDS not in found or ATTENTION_MASK not in found:
        raise ConversionFailed(
            f"{job.id}: the encoder has the inputs {', '.join(sorted(found))}; known are {INPUT_IDS}, "
            f"{ATTENTION_MASK} and, beside these, {_SEGMENTS} and {_POSITIONS}"
        )
    if (types := found.get(_SEGMENTS)) is not None:
        zeros = op.broadcast(op.constant(np.int64(0)), op.shape_of(found[INPUT_IDS]))
        types.output(0).replace(zeros.output(0))
    if (positions := found.get(_POSITIONS)) is not None:
        # Texts are padded at their end, where no token of theirs looks.
        zero = op.constant(np.int64(0))
        length = op.gather(op.shape_of(found[INPUT_IDS]), op.constant(np.int64(1)), zero)
        counted = op.range(zero, length, op.constant(np.int64(1)), "i64")
        positions.output(0).replace(op.broadcast(counted, op.shape_of(found[INPUT_IDS])).output(0))
    return [found[INPUT_IDS], found[ATTENTION_MASK]]
