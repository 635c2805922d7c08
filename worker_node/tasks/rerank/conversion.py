"""Makes rerankers: cross-encoders of the BERT family as one OpenVINO graph.

The graph takes the tokens of a pair to its logits. Inputs `input_ids`, `attention_mask` and, where the model has token
types, `token_type_ids`, all i64 [batch, length]; output `logits`, f32 [batch, labels]. The shapes are dynamic and may
be reshaped to static ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    INPUT_IDS,
    TOKEN_TYPES,
    Tensors,
    Weights,
    hidden_states,
    linear,
    name_port,
    outputs_on_cpu,
    read_tensors,
    text_input,
    token_rows,
    write_tokenizer,
)
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILE, write_canary
from worker_node.tasks.rerank.canary import CANARY_PAIRS, canary_of
from worker_node.tasks.rerank.published import CrossEncoderConfig, read_cross_encoder_config
from worker_node.tasks.rerank.task import RERANK

LOGITS = "logits"
# Tensors that a checkpoint may carry and the classifier does not use.
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")


def build_cross_encoder(config: CrossEncoderConfig, tensors: Tensors) -> ov.Model:
    """Build the graph.

    Raises ConversionFailed when a tensor is missing, has another shape than the configuration says, or is left over.
    """
    bert, prefix = config.bert, config.family.prefix
    weights = Weights(tensors, frozenset(prefix + name for name in _UNUSED))
    parameters = [text_input(INPUT_IDS), text_input(ATTENTION_MASK)]
    types = None
    if bert.type_vocab_size > 1:
        types = text_input(TOKEN_TYPES)
        parameters.append(types)
    hidden = hidden_states(
        bert,
        weights,
        parameters[0],
        op.convert(parameters[1], "f32"),
        types=types,
        prefix=prefix,
        first_position=config.first_position,
    )
    logits = _head(config, weights, op.gather(hidden, op.constant(np.int64(0)), op.constant(np.int64(1))))
    weights.expect_all_used()
    name_port(logits.output(0), LOGITS)
    return ov.Model([op.result(logits)], parameters, "cross_encoder")


def _head(config: CrossEncoderConfig, weights: Weights, first: Node) -> Node:
    """The classifier, over the vector of the first token, f32 [batch, hidden]."""
    size, labels = config.bert.hidden_size, config.labels
    if config.family.offset:
        hidden = op.tanh(linear(weights, "classifier.dense", first, size, size))
        return linear(weights, "classifier.out_proj", hidden, labels, size)
    pooled = op.tanh(linear(weights, f"{config.family.prefix}pooler.dense", first, size, size))
    return linear(weights, "classifier", pooled, labels, size)


_INPUTS = frozenset({INPUT_IDS, ATTENTION_MASK, TOKEN_TYPES})


def convert_cross_encoder(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Build, save and examine the model. Raises ConversionFailed when the files are not sound."""
    source, target = Path(job.source), Path(job.target)
    if job.quantization not in (None, Quantization.F32):
        raise ConversionFailed(f"{job.id}: reranking models are kept in f32, not {job.quantization}")
    if (job.pooling, job.normalize) != (None, None):
        raise ConversionFailed(f"{job.id}: a reranking model pools by itself; remove pooling and normalize")
    stage("building the cross-encoder")
    config = read_cross_encoder_config(source)
    if (source / MODEL_FILE).is_file():
        model = _read_graph(source / MODEL_FILE, config)
    else:
        model = build_cross_encoder(config, read_tensors(source))
    # Exact weights, as those of encoders.
    ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    tokenizer, _ = write_tokenizer(source / TOKENIZER_FILE, target / TOKENIZER_FILE, token_rows(model))
    tokenizer.enable_truncation(config.max_tokens, strategy="only_second")
    stage("computing reference scores")
    logits = outputs_on_cpu(target / MODEL_FILE, (tokenizer.encode(*pair) for pair in CANARY_PAIRS))
    if not np.isfinite(logits).all():
        raise ConversionFailed(f"{job.id}: the model made of these files gives scores that are not numbers")
    write_canary(target, canary_of(CANARY_PAIRS, logits))
    return Converted(
        kind=RERANK,
        family=config.bert.model_type,
        quantization=Quantization.F32,
        context_limit=config.max_tokens,
    )


def _read_graph(path: Path, config: CrossEncoderConfig) -> ov.Model:
    """The graph of an export, checked."""
    try:
        model = ov.Core().read_model(path)
    except RuntimeError as error:
        raise ConversionFailed(f"{path}: OpenVINO cannot read it ({error})") from error
    inputs = {name for port in model.inputs for name in port.names}
    if not {INPUT_IDS, ATTENTION_MASK} <= inputs <= _INPUTS:
        raise ConversionFailed(
            f"{path}: has the inputs {', '.join(sorted(inputs))}; a cross-encoder has input_ids, "
            "attention_mask and perhaps token_type_ids"
        )
    outputs = [port for port in model.outputs if LOGITS in port.names]
    labels = outputs[0].partial_shape[-1] if outputs else None
    if labels is None or labels.is_dynamic or labels.get_length() != config.labels:
        raise ConversionFailed(f"{path}: has no output {LOGITS} of {config.labels} labels, as config.json says")
    return model
