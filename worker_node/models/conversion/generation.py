"""Makes a generation model directory from a GGUF file: exact weights, compressed, measured, fit for the NPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import openvino as ov
import openvino_genai

from worker_node.domain import ModelKind
from worker_node.errors import ConversionFailed
from worker_node.models.catalog import Quantization
from worker_node.models.conversion.compression import compress
from worker_node.models.conversion.exact_weights import restore_exact_weights
from worker_node.models.conversion.fidelity import PROBE_TEXTS, compare, teacher_forced_logits
from worker_node.models.conversion.genai_import import import_graph
from worker_node.models.conversion.gguf_file import GgufFile
from worker_node.models.conversion.job import Job
from worker_node.models.conversion.npu_repairs import repeat_by_constant
from worker_node.models.conversion.result import Converted

DEFAULT_QUANTIZATION = Quantization.INT4_SYM
# Below this agreement with the exact weights the result is another model, not a smaller one.
_MIN_TOP1 = 0.6


def convert_gguf(job: Job, stage: Callable[[str], None]) -> Converted:
    """Import, repair, restore, compress, save, measure; raises ConversionFailed when any of it cannot be done."""
    target = Path(job.target)
    quantization = job.quantization or DEFAULT_QUANTIZATION
    gguf = GgufFile(_only_gguf(Path(job.source)))
    stage("importing the graph and the tokenizer")
    model = import_graph(gguf.path, target, Path(job.scratch))
    stage("restoring the exact weights")
    restore_exact_weights(model, gguf)
    heads, kv_heads = (
        gguf.hyperparameter("attention.head_count"),
        gguf.hyperparameter("attention.head_count_kv"),
    )
    repeat_by_constant(model, heads // kv_heads)
    stage("measuring the exact model")
    tokenizer = openvino_genai.Tokenizer(target)
    probes = [tokenizer.encode(text).input_ids.data[0].tolist() for text in PROBE_TEXTS]
    exact = teacher_forced_logits(model, probes)
    stage(f"compressing the weights to {quantization}")
    model = compress(model, quantization)
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    stage("measuring the compressed model")
    fidelity = compare(exact, teacher_forced_logits(ov.Core().read_model(target / "openvino_model.xml"), probes))
    if fidelity.top1 < _MIN_TOP1:
        raise ConversionFailed(
            f"{job.id}: with weights in {quantization} only {fidelity.top1:.0%} of the predictions agree "
            "with the exact model; choose a finer quantization"
        )
    _write_configs(gguf, target)
    return Converted(
        kind=ModelKind.GENERATION,
        family=job.family or gguf.architecture,
        quantization=quantization,
        context_limit=gguf.hyperparameter("context_length"),
        fidelity=fidelity,
    )


def _only_gguf(source: Path) -> Path:
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ConversionFailed(f"{source}: holds {len(found)} GGUF files, one is needed")
    return found[0]


def _write_configs(gguf: GgufFile, target: Path) -> None:
    tokens = {
        name: gguf.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    known = {name: int(value) for name, value in tokens.items() if value is not None}
    _write_json(target / "generation_config.json", known)
    _write_json(
        target / "config.json",
        {
            "model_type": gguf.architecture,
            "hidden_size": gguf.hyperparameter("embedding_length"),
            "num_hidden_layers": gguf.hyperparameter("block_count"),
            "num_attention_heads": gguf.hyperparameter("attention.head_count"),
            "num_key_value_heads": gguf.hyperparameter("attention.head_count_kv"),
            "max_position_embeddings": gguf.hyperparameter("context_length"),
            **known,
        },
    )
    if template := gguf.get("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, int | str]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
