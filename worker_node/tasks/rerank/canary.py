"""Known logits by which a device proves that it computes a reranker rightly: what the CPU gave in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class RerankCanary:
    """Pairs of query and document, and their logits, one row a pair; each must be met within `tolerance`."""

    pairs: tuple[tuple[str, str], ...]
    logits: tuple[tuple[float, ...], ...]
    tolerance: float

    def __post_init__(self) -> None:
        if not self.pairs or len(self.pairs) != len(self.logits):
            raise ValueError(f"{len(self.pairs)} pairs but {len(self.logits)} logits")


def canary_of(pairs: tuple[tuple[str, str], ...], logits: npt.NDArray[np.float32]) -> RerankCanary:
    """The canary for logits (f32 [pairs, labels]) as the CPU gave them."""
    spread = float(np.ptp(logits, axis=0).max())
    rows = tuple(tuple(float(x) for x in row) for row in logits)
    return RerankCanary(pairs, rows, _AT_LEAST + _OF_SPREAD * spread)
