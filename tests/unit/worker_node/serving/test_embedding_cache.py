"""The cache gives back what was kept, for the same space, device and tokens only, and stays within its size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import Device
from worker_node.tasks.embed.service import EmbeddingCache


def vectors_of(rows):
    return np.asarray([[sum(row), len(row)] for row in rows], np.float32).reshape(len(rows), 2)


def test_a_vector_belongs_to_its_space_device_and_tokens():
    cache = EmbeddingCache(10)
    cache.keep("s", Device.NPU, [[1, 2]], vectors_of([[1, 2]]))
    (found,) = cache.look_up("s", Device.NPU, [[1, 2]])
    assert found.tolist() == [3, 2]
    for space, device, row in (("t", Device.NPU, [1, 2]), ("s", Device.CPU, [1, 2]), ("s", Device.NPU, [2, 1])):
        assert cache.look_up(space, device, [row]) == [None]


def test_a_kept_vector_does_not_hold_on_to_its_batch():
    cache = EmbeddingCache(1)
    rows = [[i] for i in range(1000)]
    cache.keep("s", Device.CPU, rows, vectors_of(rows))
    (found,) = cache.look_up("s", Device.CPU, [[999]])
    assert found.base is None


@given(st.lists(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8), max_size=20), st.integers(0, 6))
def test_it_never_lies_and_never_grows_over_its_size(requests, capacity):
    cache = EmbeddingCache(capacity)
    for rows in requests:
        for row, vector in zip(rows, cache.look_up("s", Device.CPU, rows), strict=True):
            assert vector is None or vector.tolist() == [sum(row), len(row)]
        cache.keep("s", Device.CPU, rows, vectors_of(rows))
        assert len(cache) <= capacity
