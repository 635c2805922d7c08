"""Published files of rerankers, cross-encoders of the BERT family, and how one OpenVINO graph is made of them.

`config.json` names the architecture. The graph takes the tokens of a pair to its logits. Inputs `input_ids`,
`attention_mask` and, where the model has token types, `token_type_ids`, all i64 [batch, length]; output `logits`, f32
[batch, labels]. The shapes are dynamic and may be reshaped to static ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from openvino import Node
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    INPUT_IDS,
    TOKEN_TYPES,
    BertConfig,
    Tensors,
    Weights,
    hidden_states,
    linear,
    name_port,
    outputs_on_cpu,
    read_bert_config,
    read_tensors,
    read_tokenizer,
    text_input,
    token_limit,
    token_rows,
    write_tokenizer,
)
from worker_node.models.convert.job import ConversionJob, Converted, ModelFiles
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILE, WEIGHTS_FILE, peek_config, read_json, write_canary
from worker_node.models.sources import SAFETENSORS_FILE, safetensors_of, weight_files
from worker_node.tasks.rerank.task import RERANK, RerankCanary


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: the prefix of its tensors, and whether its positions begin after the padding token's."""

    model_type: str
    prefix: str
    offset: bool


FAMILIES = {
    "BertForSequenceClassification": Family("bert", "bert.", offset=False),
    "RobertaForSequenceClassification": Family("roberta", "roberta.", offset=True),
    "XLMRobertaForSequenceClassification": Family("xlm-roberta", "roberta.", offset=True),
}


def architecture_of(directory: Path) -> str | None:
    """The one architecture that `config.json` names; None where there is no readable one."""
    match peek_config(directory / "config.json").get("architectures"):
        case [str(name)]:
            return name
    return None


class _Labels(msgspec.Struct, frozen=True):
    # Hugging Face leaves them out where there are two.
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None
    pad_token_id: int = 0


@dataclass(frozen=True, slots=True)
class CrossEncoderConfig:
    """The encoder's sizes, the number of labels, the position of the first token, and the limit in tokens of a pair."""

    family: Family
    bert: BertConfig
    labels: int
    first_position: int
    max_tokens: int


def read_cross_encoder_config(directory: Path) -> CrossEncoderConfig:
    """Read the configuration. Raises ConversionFailed, naming the file and the option, for what cannot be built."""
    architecture = architecture_of(directory)
    path = directory / "config.json"
    if architecture not in FAMILIES:
        raise ConversionFailed(f"{path}: architectures = {architecture!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    bert = read_bert_config(directory, family.model_type, (architecture,), "cross-encoders")
    stated = read_json(path, _Labels)
    labels = stated.num_labels or (2 if stated.id2label is None else len(stated.id2label))
    if labels not in {1, 2}:
        raise ConversionFailed(f"{path}: the model has {labels} labels; a reranker has one, or two (no, yes)")
    first = stated.pad_token_id + 1 if family.offset else 0
    limit = min(token_limit(directory, None), bert.max_position_embeddings - first)
    return CrossEncoderConfig(family, bert, labels, first, limit)


LOGITS = "logits"
# Tensors that a checkpoint may carry and the classifier does not use.
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")


def build_cross_encoder(config: CrossEncoderConfig, tensors: Tensors) -> ov.Model:
    """Build the graph. Raises ConversionFailed when a tensor is missing, misshapen or left over."""
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


# Short and different in script, length and match, so that a device which ignores a part of its input cannot pass.
CANARY_PAIRS = (
    ("What is the capital of Japan?", "東京は日本の首都です。"),
    ("how tall is the eiffel tower", "The Eiffel Tower in Paris is 330 metres tall."),
    ("how tall is the eiffel tower", "Bananas are rich in potassium."),
    ("ok", "Quarterly revenue rose by 12% to €4.2 billion."),
    ("cat", "The quick brown fox jumps over the lazy dog while seven wizards quietly box up the last of the jugs."),
)
# bf16 on a CPU moves logits by some thousandths, by 0.03 in a random network; those of published rerankers are some 10
# apart, and a constant answer is off by half of that.
_OF_SPREAD, _AT_LEAST = 0.1, 0.05


class _Rerankers(ModelFiles):
    def recognises(self, source: Path) -> bool:
        """A directory whose `config.json` names a cross-encoder's architecture."""
        return architecture_of(source) in FAMILIES

    def weights(self, source: Path) -> list[Path]:
        exported = [source / name for name in (MODEL_FILE, WEIGHTS_FILE) if (source / MODEL_FILE).is_file()]
        files = [*(exported or weight_files(source)), source / "config.json", source / TOKENIZER_FILE]
        return [file for file in files if file.is_file()]

    def of_repository(
        self, _repository: str, architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        if not FAMILIES.keys() & set(architectures):
            return None
        # As published before as exported: exports on hubs are often of another precision than they say.
        forms = [
            form for form in (safetensors_of(names), [MODEL_FILE, WEIGHTS_FILE]) if form and set(form) <= set(names)
        ]
        missing = ([] if forms else [SAFETENSORS_FILE]) + sorted({"config.json", TOKENIZER_FILE} - set(names))
        if missing:
            raise SourceRejected(
                f"the repository holds a cross-encoder and lacks {', '.join(missing)}; look for one that has them"
            )
        return (*forms[0], TOKENIZER_FILE)

    def check(self, directory: Path) -> None:
        config = read_cross_encoder_config(directory)
        read_tokenizer(directory / TOKENIZER_FILE, config.bert.vocab_size)

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
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
        tolerance = _AT_LEAST + _OF_SPREAD * float(np.ptp(logits, axis=0).max())
        rows = tuple(tuple(float(logit) for logit in row) for row in logits)
        write_canary(target, RerankCanary(CANARY_PAIRS, rows, tolerance))
        return Converted(
            kind=RERANK,
            family=config.bert.model_type,
            quantization=Quantization.F32,
            context_limit=config.max_tokens,
        )


FILES = _Rerankers()
