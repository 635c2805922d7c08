"""The embedding engines: token ids in, pooled and normalised vectors out.

The model's graph does the whole work (`models/conversion/bert.py` builds it)."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import openvino as ov

from worker_node.encoders.dynamic import DynamicEncoder
from worker_node.encoders.static import INPUT_IDS, POSITION_IDS, SEGMENT_IDS, CannotPack, StaticEncoder, packed_encoder
from worker_node.engines.protocol import EngineSpec
from worker_node.scheduling.texts import PackingLimits, Waiting
from worker_node.tasks.embed.messages import Embedded, EmbedJob
from worker_node.tasks.embed.options import EmbeddingOptions, StaticOptions

# Measured on the emulated NPU (docs/performance.md), and about right for a CPU's own plugin, too.
_RUN_OVERHEAD_TOKENS = 32


class EmbeddingRunner(DynamicEncoder):
    """On CPU and GPU."""

    jobs = EmbedJob
    options = EmbeddingOptions
    result = Embedded
    output = "embedding"


class StaticEmbeddingRunner(StaticEncoder):
    """On the NPU: a text in each row, or as many as fit with `npu_packing`."""

    jobs = EmbedJob
    options = StaticOptions
    result = Embedded
    output = "embedding"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        options = cast("StaticOptions", self._options)
        self._packing = PackingLimits(options.npu_buckets, _RUN_OVERHEAD_TOKENS) if options.npu_packing else None
        self._limits = self._packing or self._limits

    def shaped(self, model: ov.Model, length: int) -> ov.Model:
        """See `StaticEncoder.shaped`. Raises RuntimeError for a model that cannot be packed."""
        if self._packing is None:
            return super().shaped(model, length)
        try:
            return packed_encoder(model, length, self._packing.most_texts(length))
        except CannotPack as error:
            raise RuntimeError(f"this model cannot be packed: {error}; set npu_packing = false") from None

    def length_of(self, batch: list[Waiting]) -> int:
        """See `StaticEncoder.length_of`."""
        return super().length_of(batch) if self._packing is None else self._packing.computed(batch)

    def inputs(self, batch: list[Waiting], shape: tuple[int, int]) -> dict[str, npt.NDArray[np.int64]]:
        """See `StaticEncoder.inputs`."""
        if self._packing is None:
            return super().inputs(batch, shape)
        ids, positions, segments = self._jobs.packed(batch, shape[1])
        return {INPUT_IDS: ids, POSITION_IDS: positions, SEGMENT_IDS: segments}
