"""The graph of a GGUF file: made by OpenVINO's front end, turned into the form that GenAI's pipelines run.

The front end makes llama.cpp's graph: one sequence, with caches, positions and masks as inputs. GenAI wants batches,
caches that are states, and ports by its own names. The nodes that hold weights are named after the file's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as op
from openvino.frontend import FrontEndManager
from openvino.op import assign, read_value
from openvino.op.util import Variable, VariableInfo

from worker_node.core.errors import ConversionFailed

_WEIGHT_PREFIX = "weight.weight_"
_INPUTS = frozenset({"inp_tokens", "inp_pos", "inp_out_ids", "inp_kv_idx", "self_kq_mask", "token_len_per_seq"})
_CACHE_PREFIX = "cache_"


def import_graph(path: Path) -> ov.Model:
    """The graph of a file, with the front end's weights.

    The rows of query and key matrices must be put into the published order, with rotary pairs half a head apart.
    Raises ConversionFailed when the front end cannot make it, or makes another form than its decoders have.
    """
    front_end = FrontEndManager().load_by_framework("gguf")
    try:
        return _adapt(front_end.convert(front_end.load(str(path))))
    except RuntimeError as error:
        raise ConversionFailed(f"{path}: OpenVINO's GGUF front end cannot import it ({error})") from error


def weights(graph: ov.Model) -> dict[str, Output]:
    """What the graph takes for each tensor of the file, f32, by the tensor's name."""
    return {
        node.friendly_name.removeprefix(_WEIGHT_PREFIX): node.output(0)
        for node in graph.get_ops()
        if node.friendly_name.startswith(_WEIGHT_PREFIX)
    }


def _adapt(graph: ov.Model) -> ov.Model:
    ports = {port.any_name: port for port in graph.inputs}
    if unknown := sorted(name for name in ports if not name.startswith(_CACHE_PREFIX) and name not in _INPUTS):
        raise ConversionFailed(f"the graph has inputs that are not supported: {', '.join(unknown)}")
    ids, mask, positions = (
        _parameter(name, 2, ov.Type.i64) for name in ("input_ids", "attention_mask", "position_ids")
    )
    beams = _parameter("beam_idx", 1, ov.Type.i32)
    _replace_lookups(ports["inp_tokens"], ids)
    _replace_positions(ports["inp_pos"], positions)
    _keep_all_rows(ports["inp_out_ids"])
    attentions = [node for node in graph.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    cache = _Cache(ids, beams)
    rotary, visible = _Rotary(graph), _visible(ids, mask)
    for layer, attention in enumerate(attentions):
        _replace_attention(layer, attention, cache, rotary, visible)
    # GenAI slices the rows of the last product, which must have three dimensions.
    head = _back(graph.output(0).get_node().input_value(0), "MatMul", _AFTER_HEAD)
    head.input(0).replace_source_output(op.squeeze(head.input_value(0), _axes(1)).output(0))
    logits = op.result(graph.output(0).get_node().input_value(0))
    logits.output(0).set_names({"logits"})
    return ov.Model([logits], cache.sinks, [ids, mask, positions, beams], graph.friendly_name)


def _parameter(name: str, rank: int, kind: ov.Type) -> Node:
    parameter = op.parameter([-1] * rank, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _replace_lookups(tokens: Output, ids: Node) -> None:
    """[1, 1, tokens, width] becomes [batch, 1, tokens, width]."""
    for squeezed in _readers(tokens, "Squeeze"):
        for gather in _readers(squeezed.output(0), "Gather"):
            looked_up = op.gather(gather.input_value(0), op.convert(ids, "i32"), gather.input_value(2))
            for outer in _readers(gather.output(0), "Unsqueeze"):
                outer.output(0).replace(op.unsqueeze(looked_up, _axes(1)).output(0))


def _replace_positions(given: Output, positions: Node) -> None:
    """[1, tokens, 1, 1] becomes [batch, tokens, 1, 1]."""
    for number in _readers(given, "Convert"):
        for turned in _readers(number.output(0), "Transpose"):
            turned.output(0).replace(op.unsqueeze(op.convert(positions, "f32"), _axes(2, 3)).output(0))


def _keep_all_rows(wanted: Output) -> None:
    """The front end selects the rows of the tokens whose logits are wanted; GenAI takes the last ones itself."""
    for squeezed in _readers(wanted, "Squeeze"):
        for gather in _readers(squeezed.output(0), "Gather"):
            rows = gather.input_value(0).get_node().input_value(0)
            for outer in _readers(gather.output(0), "Unsqueeze"):
                outer.output(0).replace(rows)


class _Cache:
    """Keys and values of the tokens so far: states, f32 [batch, heads, tokens, size]; `sinks` write them."""

    def __init__(self, ids: Node, beams: Node) -> None:
        self.sinks: list[Node] = []
        self._batch, self._beams = op.gather(op.shape_of(ids), _axes(0), _axis(0)), beams

    def extend(self, layer: int, kind: str, new: Node) -> Node:
        """The layer's past with what is new."""
        _, heads, _, size = new.get_output_partial_shape(0)
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, size])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = Variable(info)
        shape = op.concat([self._batch, _axes(heads.get_length(), 0, size.get_length())], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        past = op.gather(read_value(empty, variable), self._beams, _axis(0))
        joined = op.concat([past, new], 2)
        self.sinks.append(assign(joined, variable))
        return joined


def _replace_attention(layer: int, attention: Node, cache: _Cache, rotary: _Rotary, visible: Node) -> None:
    query = rotary.turn(_exact(attention.input_value(0)))
    heads, size = (query.get_output_partial_shape(0)[axis].get_length() for axis in (1, 3))
    kept = []
    for port, kind in ((1, "key"), (2, "value")):
        new = _exact(_back(attention.input_value(port), "ScatterUpdate").input_value(2))
        joined = cache.extend(layer, kind, rotary.turn(new) if kind == "key" else _by_heads(new))
        repeats = heads // joined.get_output_partial_shape(0)[1].get_length()
        if repeats > 1:
            # Broadcast to a constant shape: the NPU path cannot compute one.
            joined = op.broadcast(
                op.unsqueeze(joined, _axes(2)), _axes(1, 1, repeats, 1, 1), broadcast_spec="BIDIRECTIONAL"
            )
            joined = op.reshape(joined, _axes(0, heads, -1, size), special_zero=True)
        kept.append(joined)
    # The front end rounds the scale to f16.
    scale, usual = np.float32(attention.input_value(4).get_node().data), np.float32(size**-0.5)
    exact = usual if np.float16(usual) == np.float16(scale) else scale
    attended = op.scaled_dot_product_attention(query, *kept, visible, op.constant(exact))
    merged = _by_heads(attended)
    for back in _readers(attention.output(0), "Transpose"):
        for number in _readers(back.output(0), "Convert"):
            number.output(0).replace(merged.output(0))


# The operations from a rotated value back to what is rotated, in llama.cpp's two orders of the pairs.
_ROTATIONS = (
    ("Add", "Multiply"),
    ("Transpose", "Concat", "Add", "Multiply", "VariadicSplit", "Transpose", "Reshape"),
)


class _Rotary:
    """The rotary embedding in the form that the plugins fuse into one operation."""

    def __init__(self, graph: ov.Model) -> None:
        nodes = {node.friendly_name: node for node in graph.get_ops()}
        if not {"rope_cos", "rope_sin"} <= set(nodes):
            raise ConversionFailed("the graph has no rotary embedding")
        self._cos, self._sin = (_by_heads(op.concat([nodes[name]] * 2, 3)) for name in ("rope_cos", "rope_sin"))

    def turn(self, rotated: Output) -> Node:
        """[batch, heads, tokens, size] of the front end's rotation, [batch, tokens, heads, size]."""
        x = _by_heads(_unrotated(rotated))
        half = x.get_output_partial_shape(0)[3].get_length() // 2
        # To the end, not to the size: the fusion looks for that.
        low, high = (
            op.slice(x, *(_axes(bound) for bound in (first, last, 1, 3)))
            for first, last in ((0, half), (half, np.iinfo(np.int64).max))
        )
        swapped = op.concat([op.multiply(high, np.full((1, 1, 1, 1), -1, np.float32)), low], -1)
        return op.add(op.multiply(x, self._cos), op.multiply(swapped, self._sin))


def _unrotated(rotated: Output) -> Output:
    for kinds in _ROTATIONS:
        value = rotated
        for kind in kinds:
            if value.get_node().get_type_name() != kind:
                break
            value = value.get_node().input_value(0)
        else:
            return value
    raise ConversionFailed(f"{rotated.get_node().friendly_name} is not a rotary embedding that is supported")


def _visible(ids: Node, mask: Node) -> Node:
    """What is added to the scores, f32 [batch, 1, tokens, tokens and past]: padding and later tokens are hidden."""
    total, length = (op.gather(op.shape_of(node), op.constant(np.int64(1)), _axis(0)) for node in (mask, ids))
    one = op.constant(np.int64(1))
    columns = op.unsqueeze(op.range(_axis(0), total, one, "i64"), _axes(0))
    rows = op.unsqueeze(op.range(op.subtract(total, length), total, one, "i64"), _axes(1))
    earlier = op.unsqueeze(op.less_equal(columns, rows), _axes(0, 1))
    allowed = op.logical_and(earlier, op.unsqueeze(op.convert(mask, "boolean"), _axes(1, 2)))
    # Finite: a row of −inf only would give NaN.
    return op.select(allowed, op.constant(np.float32(0)), op.constant(np.float32(-65504)))


_THROUGH = frozenset({"Convert", "Reshape", "Transpose", "Broadcast", "Unsqueeze", "Concat"})
_AFTER_HEAD = frozenset({"Multiply", "Divide", "Tanh", "Add", "Convert"})


def _back(output: Output, kind: str, through: frozenset[str] = _THROUGH) -> Node:
    """The node of that kind which an output comes from, through operations of other kinds."""
    node = output.get_node()
    while node.get_type_name() != kind:
        if node.get_type_name() not in through:
            raise ConversionFailed(
                f"the graph has {node.friendly_name}, a {node.get_type_name()}, where {kind} is expected"
            )
        node = node.input_value(0).get_node()
    return node


def _exact(output: Output) -> Output:
    """The f32 value, [batch, tokens, heads, size], that was rounded to f16 for the cache or the query."""
    return _back(output, "Convert").input_value(0)


def _by_heads(value: Node | Output) -> Node:
    """[batch, tokens, heads, size] as [batch, heads, tokens, size], and back."""
    return op.transpose(value, _axes(0, 2, 1, 3))


def _readers(output: Output, kind: str) -> Iterator[Node]:
    found = [port.get_node() for port in output.get_target_inputs()]
    return (node for node in found if node.get_type_name() == kind)


def _axes(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _axis(value: int) -> Node:
    return op.constant(np.int64(value))
