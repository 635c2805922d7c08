"""Makes a generation model directory from a GGUF file: exact weights, compressed, measured, fit for the NPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import openvino as ov
import openvino_genai

from worker_node.core.errors import ConversionFailed
from worker_node.core.types import ModelKind
from worker_node.models.canary import GenerationCanary
from worker_node.models.catalog import Quantization
from worker_node.models.conversion.compression import compress
from worker_node.models.conversion.exact_logits import exact_logits
from worker_node.models.conversion.exact_weights import restore_exact_weights
from worker_node.models.conversion.fidelity import PROBE_TEXTS, compare, teacher_forced_logits
from worker_node.models.conversion.genai_import import import_graph
from worker_node.models.conversion.gguf_file import GgufFile
from worker_node.models.conversion.gguf_rewriting import readable_file
from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.mapped_pages import pages_dropped
from worker_node.models.conversion.npu_repairs import repeat_by_constant
from worker_node.models.conversion.result import Converted
from worker_node.models.directory import family_of
from worker_node.models.manifest import MODEL_FILE

# Chosen by fidelity and speed together: docs/models.md has the figures.
DEFAULT_QUANTIZATION = Quantization.INT4_INT8
# Files up to this size are measured while they are compressed: that takes a second copy of their weights.
_SMALL_BYTES = 1 << 29
# Below this agreement with the exact weights the result is another model, not a smaller one.
_MIN_TOP1 = 0.6

_T = TypeVar("_T")
_TOKEN_FIELDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def convert_gguf(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    """Import, restore, repair, compress, save, measure; raises ConversionFailed when any of it cannot be done."""
    with pages_dropped():
        return _convert(job, stage)


def _convert(job: ConversionJob, stage: Callable[[str], None]) -> Converted:
    target = Path(job.target)
    quantization = job.quantization or DEFAULT_QUANTIZATION
    gguf = GgufFile(_only_gguf(Path(job.source)))
    stage("importing the graph and the tokenizer")
    model = import_graph(readable_file(gguf, Path(job.scratch)), target, Path(job.scratch))
    tokenizer = openvino_genai.Tokenizer(target)
    probes = [tokenizer.encode(text).input_ids.data[0].tolist() for text in PROBE_TEXTS]
    template = str(gguf.get("tokenizer.chat_template") or "")
    _write_configs(gguf, target, template)
    with ThreadPoolExecutor() as threads:
        pool = threads if gguf.path.stat().st_size <= _SMALL_BYTES else None
        exact = _started(pool, lambda: exact_logits(gguf, probes))
        stage("restoring the exact weights")
        restore_exact_weights(model, gguf, Path(job.scratch))
        repeat_by_constant(model, _count(gguf, "attention.head_count") // _count(gguf, "attention.head_count_kv"))
        stage(f"compressing the weights to {quantization}")
        ov.save_model(compress(model, quantization), target / MODEL_FILE, compress_to_fp16=False)
        del model
        stage("measuring the compressed model against the exact one")
        asked = _started(pool, lambda: _expect_answer(job.id, target, job.canary))
        fidelity = compare(exact(), teacher_forced_logits(ov.Core().read_model(target / MODEL_FILE), probes))
        if fidelity.top1 < _MIN_TOP1:
            raise ConversionFailed(
                f"{job.id}: with weights in {quantization} only {fidelity.top1:.0%} of the predictions are those of "
                "the exact weights; choose a finer quantization"
            )
        if job.canary is not None:
            stage("asking the canary's question")
        asked()
    return Converted(
        kind=ModelKind.GENERATION,
        family=family_of(gguf.architecture, template),
        quantization=quantization,
        context_limit=_count(gguf, "context_length"),
        fidelity=fidelity,
        canary=job.canary,
    )


def _only_gguf(source: Path) -> Path:
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ConversionFailed(f"{source}: holds {len(found)} GGUF files, one is needed")
    return found[0]


def _count(gguf: GgufFile, name: str) -> int:
    return gguf.hyperparameter(name)


def _write_configs(gguf: GgufFile, target: Path, template: str) -> None:
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_FIELDS.items()}
    known = {name: int(value) for name, value in ids.items() if value is not None}
    # The answer ends at the end-of-sequence token only because this file says which it is.
    _write_json(target / "generation_config.json", known)
    sizes = {
        "hidden_size": _count(gguf, "embedding_length"),
        "num_hidden_layers": _count(gguf, "block_count"),
        "num_attention_heads": _count(gguf, "attention.head_count"),
        "num_key_value_heads": _count(gguf, "attention.head_count_kv"),
        "max_position_embeddings": _count(gguf, "context_length"),
    }
    _write_json(target / "config.json", {"model_type": gguf.architecture, **sizes, **known})
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, int | str]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _started(pool: ThreadPoolExecutor | None, step: Callable[[], _T]) -> Callable[[], _T]:
    """What returns the step's result: it waits for the thread that does it, or, without a pool, does it then."""
    return step if pool is None else pool.submit(step).result


def _expect_answer(model_id: str, target: Path, canary: GenerationCanary | None) -> None:
    if canary is None:
        return
    pipeline = openvino_genai.LLMPipeline(target, "CPU")
    config = pipeline.get_generation_config()
    config.max_new_tokens = canary.max_new_tokens
    config.do_sample = False
    answer = pipeline.generate([canary.prompt], config).texts[0]
    if not canary.accepts(answer):
        raise ConversionFailed(
            f"{model_id}: asked {canary.prompt!r}, the converted model answered {answer[:80]!r}, without "
            f"{' and '.join(canary.expected)}; a node would not serve it. Choose another quantization"
        )
