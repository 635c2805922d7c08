"""Reference scores of a model that was converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from tokenizers import Tokenizer

from worker_node.models.convert.embedding import TOKENIZER_FILE
from worker_node.models.convert.encoder import ATTENTION_MASK, INPUT_IDS
from worker_node.models.manifest import MODEL_FILE
from worker_node.tasks.rerank.names import LOGITS, TOKEN_TYPES


def score_on_cpu(directory: Path, pairs: tuple[tuple[str, str], ...], limit: int) -> NDArray[np.float32]:
    """Logits of some pairs, one by one, on the CPU in float32: what every other device is compared with."""
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    tokenizer.enable_truncation(limit, strategy="only_second")
    compiled = ov.Core().compile_model(
        directory / MODEL_FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    )
    names = {port.any_name for port in compiled.inputs}
    rows = []
    for query, document in pairs:
        encoding = tokenizer.encode(query, document)
        values = {INPUT_IDS: encoding.ids, ATTENTION_MASK: encoding.attention_mask, TOKEN_TYPES: encoding.type_ids}
        inputs = {name: np.array([value], np.int64) for name, value in values.items() if name in names}
        rows.append(compiled(inputs)[LOGITS][0].copy())
    return np.stack(rows)
