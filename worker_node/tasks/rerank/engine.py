"""The reranking engines: pairs of query and document as token ids in, the classifier's logits out."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from worker_node.encoders.dynamic import DynamicEncoder
from worker_node.encoders.jobs import RowJobs
from worker_node.encoders.static import StaticEncoder
from worker_node.scheduling.texts import Waiting
from worker_node.tasks.rerank.messages import LOGITS, TOKEN_TYPES, RerankJob, Scored
from worker_node.tasks.rerank.options import DynamicRerankOptions, StaticRerankOptions

Inputs = dict[str, npt.NDArray[np.int64]]


class RerankRunner(DynamicEncoder):
    """On CPU and GPU."""

    jobs = RerankJob
    options = DynamicRerankOptions
    result = Scored
    output = LOGITS

    def inputs(self, batch: list[Waiting], shape: tuple[int, int]) -> Inputs:
        """See `DynamicEncoder.inputs`."""
        return with_types(super().inputs(batch, shape), self._names, self._jobs, batch)


class StaticRerankRunner(StaticEncoder):
    """On the NPU."""

    jobs = RerankJob
    options = StaticRerankOptions
    result = Scored
    output = LOGITS

    def inputs(self, batch: list[Waiting], shape: tuple[int, int]) -> Inputs:
        """See `StaticEncoder.inputs`."""
        return with_types(super().inputs(batch, shape), self._names, self._jobs, batch)


def with_types(inputs: Inputs, names: frozenset[str], held: RowJobs, batch: list[Waiting]) -> Inputs:
    """The inputs with the type of each token, 1 from where the document begins, if the model has that input."""
    if TOKEN_TYPES not in names:
        return inputs
    types = np.zeros_like(inputs["input_ids"])
    for row, waiting in enumerate(batch):
        job = cast("RerankJob", held.job(waiting.job_id))
        types[row, job.queries[waiting.row] : waiting.length] = 1
    return inputs | {TOKEN_TYPES: types}
