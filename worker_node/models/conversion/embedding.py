"""Makes an embedding model directory from the safetensors files of a sentence encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from tokenizers import Tokenizer

from worker_node.domain import ModelKind
from worker_node.errors import ConversionFailed
from worker_node.models.canary import CANARY_TEXTS, EmbeddingCanary, write_embedding_canary
from worker_node.models.catalog import Quantization
from worker_node.models.conversion.bert import build_encoder
from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.pooling import ATTENTION_MASK, EMBEDDING, INPUT_IDS
from worker_node.models.conversion.result import Converted
from worker_node.models.conversion.safetensors_file import read_tensors
from worker_node.models.conversion.sentence_config import read_bert_config, sentence_config_of
from worker_node.models.conversion.space import space_fingerprint
from worker_node.models.conversion.tokenizer_file import TOKENIZER_FILE, write_tokenizer
from worker_node.models.download import file_sha256
from worker_node.models.manifest import MODEL_FILE


def convert_encoder(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Build, save and examine the model; raises ConversionFailed when the files are not sound."""
    source = Path(job.source)
    if job.quantization not in (None, Quantization.F32):
        raise ConversionFailed(f"{job.id}: embedding models are kept in f32, not {job.quantization}")
    stage("building the encoder")
    bert, sentence = read_bert_config(source), sentence_config_of(source, job)
    weights = source / "model.safetensors"
    model = build_encoder(bert, sentence, read_tensors(weights))
    return finish_embedding_model(
        job,
        model,
        stage,
        family="bert",
        context_limit=min(sentence.max_tokens, bert.max_position_embeddings),
        weights_sha256=file_sha256(weights),
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
    tokenizer_sha256 = write_tokenizer(Path(job.source) / TOKENIZER_FILE, target / TOKENIZER_FILE)
    stage("computing reference vectors")
    vectors = embed_on_cpu(target, CANARY_TEXTS)
    norms = np.linalg.norm(vectors, axis=1)
    if not np.isfinite(vectors).all() or (normalised and not np.allclose(norms, 1.0, atol=1e-4)):
        raise ConversionFailed(f"{job.id}: the encoder made of these files gives vectors that are not sound")
    rows = tuple(tuple(float(x) for x in vector) for vector in vectors)
    write_embedding_canary(target, EmbeddingCanary(CANARY_TEXTS, rows))
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
    )


def embed_on_cpu(directory: Path, texts: tuple[str, ...]) -> NDArray[np.float32]:
    """Vectors of some texts, one by one, on the CPU in float32: what every other device is compared with."""
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    compiled = ov.Core().compile_model(
        directory / MODEL_FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    )
    rows = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        rows.append(compiled({INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids)})[EMBEDDING][0].copy())
    return np.stack(rows)
