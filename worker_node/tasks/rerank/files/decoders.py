"""Decoders that rank: Qwen3-Reranker's form, exported to OpenVINO.

Nothing but its name tells such a model from one that chats: `rerank` in the directory's name, or in `_name_or_path` of
`config.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.manifest import MODEL_FILE
from worker_node.tasks.rerank.files.architectures import architecture_of
from worker_node.tasks.rerank.files.canary import CANARY_PAIRS, canary_of, write_rerank_canary
from worker_node.tasks.rerank.files.decoder_graph import classifier_of
from worker_node.tasks.rerank.files.prompt import RerankPrompt, write_prompt
from worker_node.tasks.rerank.files.scoring import score_on_cpu
from worker_node.tasks.rerank.kind import RERANK

KNOWN = "Qwen3ForCausalLM"
# What the model card reads of a prompt; the positions go further.
_MAX_TOKENS = 8192


class _Decoder(msgspec.Struct, frozen=True):
    max_position_embeddings: int
    model_type: str = "qwen3"


def check_decoder(source: Path) -> int:
    """The limit in tokens of a prompt. Raises ConversionFailed for what cannot be served, and says what can."""
    architecture, path = architecture_of(source), source / "config.json"
    if architecture != KNOWN:
        raise ConversionFailed(
            f"{path}: architectures = {architecture!r}; of decoders that rank, Qwen3-Reranker's form is known "
            f"({KNOWN}): others have other prompts. Leave rerank out of the name to serve it as a model that generates"
        )
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Decoder)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionFailed(f"{path}: not readable ({error})") from error
    return min(_MAX_TOKENS, config.max_position_embeddings)


def convert_decoder(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Make the model's directory. Raises ConversionFailed."""
    source, target = Path(job.source), Path(job.target)
    limit = check_decoder(source)
    set_by_job: dict[str, Any] = {
        "quantization": job.quantization,
        "pooling": job.pooling,
        "normalize": job.normalize,
    }
    if given := [name for name, value in set_by_job.items() if value is not None]:
        raise ConversionFailed(f"{job.id}: a decoder that ranks is taken as it was exported; remove {', '.join(given)}")
    if not (source / MODEL_FILE).is_file():
        raise ConversionFailed(
            f"{source}: a decoder that ranks must be exported first: optimum-cli export openvino "
            f"--task text-generation --model {source} {source.name}-ov"
        )
    stage("making a classifier of the decoder")
    words = write_prompt(source, target)
    # As it was exported: weights that are compressed stay so.
    ov.save_model(classifier_of(source / MODEL_FILE, words), target / MODEL_FILE, compress_to_fp16=False)
    stage("computing reference scores")
    prompt = RerankPrompt()
    pairs = tuple((prompt.of_query(query), prompt.of_document(document)) for query, document in CANARY_PAIRS)
    logits = score_on_cpu(target, pairs, limit)
    if not np.isfinite(logits).all():
        raise ConversionFailed(f"{job.id}: the model made of these files gives scores that are not numbers")
    write_rerank_canary(target, canary_of(CANARY_PAIRS, logits))
    return Converted(kind=RERANK, family="qwen3", quantization="as exported", context_limit=limit)
