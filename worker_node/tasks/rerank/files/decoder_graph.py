"""Makes a classifier of a decoder's graph: from the tokens of a prompt to the logits of two words as the next token.

Inputs `input_ids` and `attention_mask`, i64 [batch, length], padded at the end; output `logits`, f32 [batch, 2]. The
logits of all other words, and of all other places, are not computed. A KV cache, which exports have as state, is taken
out: each prompt is read once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node, Output
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.encoder import ATTENTION_MASK, INPUT_IDS, Pooling, i64, name_port, pool
from worker_node.tasks.rerank.names import LOGITS

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
    head = _head(model, path)
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


def _head(model: ov.Model, path: Path) -> Node:
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
