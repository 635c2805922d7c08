"""Pooling where the device computes in bf16, in which 256 and 1 is 256."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from worker_node.models.convert.encoder import Pooling, pool

BF16 = {"INFERENCE_PRECISION_HINT": "bf16"}
TOKENS = [0, 1, 255, 256, 257, 258, 301, 511, 600]


def pooled(pooling, hidden, mask):
    """What a CPU with bf16 makes of token vectors, f32 [batch, length, size]."""
    parameters = [op.parameter([-1, -1, -1], np.float32), op.parameter([-1, -1], np.int64)]
    graph = ov.Model([op.result(pool(*parameters, pooling, normalise=False))], parameters, "pooling")
    return ov.compile_model(graph, "CPU", BF16)([hidden, mask])[0]


@pytest.mark.parametrize("padded", ["at the end", "in front"])
def test_the_last_token_of_a_long_text_is_found_in_bf16(padded):
    longest = max(TOKENS)
    mask = np.array([[1] * tokens + [0] * (longest - tokens) for tokens in TOKENS], np.int64)
    mask = mask if padded == "at the end" else mask[:, ::-1].copy()
    # Numbers that bf16 has exactly; no two neighbours are alike.
    hidden = np.tile(np.arange(longest, dtype=np.float32)[None, :, None] % 251 + 1, (len(TOKENS), 1, 2))
    ends = [tokens - 1 if padded == "at the end" else longest - 1 for tokens in TOKENS]
    wanted = [row[end] if tokens else [0, 0] for row, end, tokens in zip(hidden, ends, TOKENS, strict=True)]
    np.testing.assert_array_equal(pooled(Pooling.LAST, hidden, mask), wanted)
