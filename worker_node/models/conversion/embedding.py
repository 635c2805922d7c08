"""Makes an embedding model directory from the safetensors files of a sentence encoder."""

from __future__ import annotations

import hashlib
import json
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
from worker_node.models.conversion.bert import EMBEDDING, build_encoder
from worker_node.models.conversion.bert_config import read_sentence_encoder
from worker_node.models.conversion.job import Job
from worker_node.models.conversion.result import Converted
from worker_node.models.conversion.safetensors_file import read_tensors
from worker_node.models.conversion.space import space_fingerprint
from worker_node.models.download import file_sha256

TOKENIZER_FILE = "tokenizer.json"


def convert_encoder(job: Job, stage: Callable[[str], None]) -> Converted:
    """Build, save and examine the model; raises ConversionFailed when the files are not sound."""
    source, target = Path(job.source), Path(job.target)
    if job.quantization not in (None, Quantization.F32):
        raise ConversionFailed(f"{job.id}: embedding models are kept in f32, not {job.quantization}")
    stage("building the encoder")
    encoder = read_sentence_encoder(source)
    weights = source / "model.safetensors"
    model = build_encoder(encoder, read_tensors(weights))
    # Exact weights: rounded to f16 they would be read no faster, for the CPU widens them when it compiles.
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    tokenizer_sha256 = write_tokenizer(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    stage("computing reference vectors")
    vectors = embed_on_cpu(target, CANARY_TEXTS)
    _check_vectors(job, vectors, encoder.bert.hidden_size, normalised=encoder.normalise)
    write_embedding_canary(
        target, EmbeddingCanary(CANARY_TEXTS, tuple(tuple(float(x) for x in vector) for vector in vectors))
    )
    return Converted(
        kind=ModelKind.EMBEDDING,
        family="bert",
        quantization=Quantization.F32,
        context_limit=encoder.context_limit,
        dimensions=encoder.bert.hidden_size,
        space=space_fingerprint(
            weights_sha256=file_sha256(weights),
            tokenizer_sha256=tokenizer_sha256,
            pooling=encoder.pooling,
            normalised=encoder.normalise,
            dimensions=encoder.bert.hidden_size,
        ),
    )


def write_tokenizer(source: Path, target: Path) -> str:
    """Copy a tokenizer without its truncation and padding, which act in silence; returns the sha256 of what
    it says.

    The hash is over the canonical form, so that it depends on what the tokenizer does and not on its layout.
    """
    try:
        tokenizer = json.loads(source.read_bytes())
        tokenizer["truncation"] = tokenizer["padding"] = None
        canonical = json.dumps(tokenizer, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        Tokenizer.from_str(canonical)
    except Exception as error:
        raise ConversionFailed(f"{source}: not a readable tokenizer ({error})") from error
    target.write_text(canonical, encoding="utf-8")
    return hashlib.sha256(canonical.encode()).hexdigest()


def embed_on_cpu(directory: Path, texts: tuple[str, ...]) -> NDArray[np.float32]:
    """Vectors of some texts, one by one, on the CPU in float32: what every other device is compared with."""
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    compiled = ov.Core().compile_model(
        directory / "openvino_model.xml",
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"},
    )
    rows = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        rows.append(compiled({"input_ids": ids, "attention_mask": np.ones_like(ids)})[EMBEDDING][0].copy())
    return np.stack(rows)


def _check_vectors(job: Job, vectors: NDArray[np.float32], dimensions: int, *, normalised: bool) -> None:
    norms = np.linalg.norm(vectors, axis=1)
    sound = vectors.shape[1] == dimensions and bool(np.isfinite(vectors).all())
    if not sound or (normalised and not np.allclose(norms, 1.0, atol=1e-5)):
        raise ConversionFailed(f"{job.id}: the encoder built from these files gives vectors that are not sound")
