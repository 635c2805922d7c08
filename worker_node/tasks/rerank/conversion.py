"""Makes rerankers: cross-encoders of the BERT family as one OpenVINO graph, and decoders reduced to their two words.

The graph takes the tokens of a pair to its logits. Inputs `input_ids`, `attention_mask` and, where the model has token
types, `token_type_ids`, all i64 [batch, length]; output `logits`, f32 [batch, labels]. The shapes are dynamic and may
be reshaped to static ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node, Output
from openvino import opset13 as op
from tokenizers import Tokenizer

from worker_node.core.errors import ConversionFailed
from worker_node.encoders.jobs import TOKEN_TYPES
from worker_node.models.catalog import Quantization
from worker_node.models.convert.encoder import (
    ATTENTION_MASK,
    INPUT_IDS,
    Pooling,
    Tensors,
    Weights,
    hidden_states,
    i64,
    linear,
    name_port,
    pool,
    read_tensors,
    text_input,
)
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.convert.tokenizer import TOKENIZER_FILE, write_tokenizer
from worker_node.models.directory import MODEL_FILE
from worker_node.tasks.rerank.canary import CANARY_PAIRS, canary_of, write_rerank_canary
from worker_node.tasks.rerank.prompt import RerankPrompt, write_prompt
from worker_node.tasks.rerank.published import CrossEncoderConfig, architecture_of, read_cross_encoder_config
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


# Reference scores of a model that was converted.


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


# Makes a reranking model's directory of a published cross-encoder: safetensors, or a graph in OpenVINO form.

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


# Makes a classifier of a decoder's graph: from the tokens of a prompt to the logits of two words as the next token.
#
# Inputs `input_ids` and `attention_mask`, i64 [batch, length], padded at the end; output `logits`, f32 [batch, 2]. The
# logits of all other words, and of all other places, are not computed. A KV cache, which exports have as state, is
# taken
# out: each prompt is read once.

_POSITIONS, _BEAMS = "position_ids", "beam_idx"
_KNOWN = frozenset({INPUT_IDS, ATTENTION_MASK, _POSITIONS, _BEAMS})


def classifier_of(path: Path, words: tuple[int, int]) -> ov.Model:
    """The classifier, of the graph in a file, for two tokens. Raises ConversionFailed for a graph of another form."""
    try:
        model = ov.Core().read_model(path)
    except RuntimeError as error:
        raise ConversionFailed(f"{path}: OpenVINO cannot read it ({error})") from error
    inputs = {name: port.get_node() for port in model.inputs for name in port.names}
    if not {INPUT_IDS, ATTENTION_MASK} <= inputs.keys() <= _KNOWN:
        raise ConversionFailed(
            f"{path}: has the inputs {', '.join(sorted(inputs))}; a decoder has {INPUT_IDS}, {ATTENTION_MASK} and "
            f"perhaps {_POSITIONS} and {_BEAMS}. Export it with optimum-cli export openvino --task text-generation"
        )
    head = _decoder_graph_head(model, path)
    weights = _rows(head, words, path)
    ids, mask = inputs[INPUT_IDS], inputs[ATTENTION_MASK]
    _take_out_state(model, path)
    _replace_positions(inputs, ids)
    hidden = op.convert(head.input_value(0), "f32")
    last = pool(hidden, mask, Pooling.LAST, normalise=False)
    logits = op.matmul(last, op.constant(weights), False, True)
    for port in model.outputs:
        port.set_names(set())
    name_port(logits.output(0), LOGITS)
    return ov.Model([op.result(logits)], [ids, mask], "decoder_classifier")


def _decoder_graph_head(model: ov.Model, path: Path) -> Node:
    """The product of hidden states and the words' vectors."""
    node = next((port.get_node().input_value(0).get_node() for port in model.outputs if LOGITS in port.names), None)
    while node is not None and node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node is None or node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
        found = "no such output" if node is None else f"they come from {node.get_type_name()}"
        raise ConversionFailed(f"{path}: a decoder's {LOGITS} come from a MatMul; here {found}")
    return node


def _rows(head: Node, words: tuple[int, int], path: Path) -> NDArray[np.float32]:
    """The vectors of two words, f32 [2, size], of weights in whatever precision they are kept."""
    rows_first = bool(head.get_attributes()["transpose_b"])
    chosen = op.gather(head.input_value(1), i64(*words), op.constant(np.int64(0 if rows_first else 1)))
    try:
        constant = ov.Model([op.result(op.convert(chosen, "f32"))], [], "words")
        compiled = ov.Core().compile_model(constant, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        rows: NDArray[np.float32] = compiled([])[0].copy()
    except RuntimeError as error:
        raise ConversionFailed(f"{path}: the vectors of the words are no constants ({error})") from error
    return rows if rows_first else np.ascontiguousarray(rows.T)


def _take_out_state(model: ov.Model, path: Path) -> None:
    """Let every cache be what it is before the first token."""
    for node in [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]:
        if node.get_input_size() == 0:
            raise ConversionFailed(f"{path}: {node.get_friendly_name()}: a state without what it begins with")
        node.output(0).replace(node.input_value(0))


def _replace_positions(inputs: dict[str, Node], ids: Node) -> None:
    """Positions count from 0, and every row of a batch continues itself."""
    rows, length = (_size(ids, axis) for axis in (0, 1))
    if (positions := inputs.get(_POSITIONS)) is not None:
        counted = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), "i64")
        _replace(positions, op.broadcast(counted, op.shape_of(ids)).output(0))
    if (beams := inputs.get(_BEAMS)) is not None:
        counted = op.range(op.constant(np.int64(0)), rows, op.constant(np.int64(1)), "i64")
        _replace(beams, op.convert(counted, beams.get_element_type().get_type_name()).output(0))


def _replace(parameter: Node, by: Output) -> None:
    parameter.output(0).replace(by)


def _size(ids: Node, axis: int) -> Node:
    zero = op.constant(np.int64(0))
    return op.gather(op.shape_of(ids), op.constant(np.int64(axis)), zero)


# Decoders that rank: Qwen3-Reranker's form, exported to OpenVINO.
#
# Nothing but its name tells such a model from one that chats: `rerank` in the directory's name, or in `_name_or_path`
# of
# `config.json`.

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
