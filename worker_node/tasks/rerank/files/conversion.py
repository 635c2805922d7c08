"""Makes a reranking model's directory of a published cross-encoder: safetensors, or a graph in OpenVINO form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov

from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.convert.embedding import TOKENIZER_FILE, write_tokenizer
from worker_node.models.convert.encoder import ATTENTION_MASK, INPUT_IDS
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.convert.safetensors import read_tensors
from worker_node.models.manifest import MODEL_FILE
from worker_node.tasks.rerank.files.canary import CANARY_PAIRS, canary_of, write_rerank_canary
from worker_node.tasks.rerank.files.config import CrossEncoderConfig, read_cross_encoder_config
from worker_node.tasks.rerank.files.graph import build_cross_encoder
from worker_node.tasks.rerank.files.scoring import score_on_cpu
from worker_node.tasks.rerank.kind import RERANK
from worker_node.tasks.rerank.names import LOGITS, TOKEN_TYPES

WEIGHTS = "model.safetensors"
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
        model = build_cross_encoder(config, read_tensors(source / WEIGHTS))
    # Exact weights, as those of encoders.
    ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
    write_tokenizer(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    stage("computing reference scores")
    logits = score_on_cpu(target, CANARY_PAIRS, config.max_tokens)
    if not np.isfinite(logits).all():
        raise ConversionFailed(f"{job.id}: the model made of these files gives scores that are not numbers")
    write_rerank_canary(target, canary_of(CANARY_PAIRS, logits))
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
