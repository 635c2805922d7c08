"""Makes the graph that GenAI imports from GGUF fit for the NPU path, without changing what it computes."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as op

from worker_node.core.errors import ConversionFailed

_GROUPED_QUERY_RANK = 5


def repeat_by_constant(model: ov.Model, repeats: int) -> int:
    """Let the grouped-query repeat of keys and values broadcast to a constant shape; returns how many were
    changed.

    GenAI builds the target shape [batch, kv_heads, repeats, 0, head] with a zero for the length. The static
    shapes of the NPU path make "Broadcast incorrect target shape" of it. A bidirectional broadcast to [1, 1,
    repeats, 1, 1] says the same without naming the other dimensions.

    Raises ConversionFailed when the graph's repeats are not those of the metadata.
    """
    changed = 0
    for node in model.get_ordered_ops():
        shape = node.get_output_partial_shape(0) if node.get_output_size() else None
        if node.get_type_name() != "Broadcast" or shape is None or shape.rank.get_length() != _GROUPED_QUERY_RANK:
            continue
        if shape[2].is_static and shape[2].get_length() != repeats:
            raise ConversionFailed(f"{node.friendly_name} repeats {shape[2]} times, the metadata says {repeats}")
        target = op.constant(np.array([1, 1, repeats, 1, 1], dtype=np.int64))
        repeated = op.broadcast(node.input_value(0), target, broadcast_spec="BIDIRECTIONAL")
        node.output(0).replace(repeated.output(0))
        changed += 1
    model.validate_nodes_and_infer_types()
    return changed
