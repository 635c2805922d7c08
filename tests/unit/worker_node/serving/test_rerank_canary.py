"""A device that computes a reranker wrongly is not called ready."""

import numpy as np
import pytest

from worker_node.encoders.jobs import RowResult
from worker_node.engines.process import CanaryFailed
from worker_node.tasks.rerank.building import rerank_canary
from worker_node.tasks.rerank.conversion import canary_of
from worker_node.tasks.rerank.tokenizer import Pair

PAIRS = (("a", "b"), ("a", "c"), ("d", "e"))
KNOWN = np.array([[8.0], [-3.0], [0.5]], "<f4")


class Engine:
    def __init__(self, logits):
        self.logits = np.asarray(logits, "<f4")

    async def run(self, job, result):
        assert job.lengths == [2, 2, 2]
        yield RowResult(job.id, self.logits.tobytes(), 0.0, 0.0)


async def examine(logits):
    known = canary_of(PAIRS, KNOWN)
    await rerank_canary([Pair([1, 2], 1)] * 3, known.logits, known.tolerance)(Engine(logits))


@pytest.mark.parametrize("noise", [0.0, 0.003, -0.3])
async def test_rounding_passes_the_canary(noise):
    await examine(KNOWN + noise)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((3, 1)),
        np.full((3, 1), KNOWN.mean()),
        KNOWN[::-1],
        -KNOWN,
        np.full((3, 1), np.nan),
        np.full((3, 1), np.inf),
        np.zeros((3, 2)),
    ],
    ids=["zeros", "constant", "mixed up", "negated", "no numbers", "infinite", "another shape"],
)
async def test_garbage_fails_the_canary(wrong):
    with pytest.raises(CanaryFailed):
        await examine(wrong)
