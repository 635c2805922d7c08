"""Results of embedding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend_client.results.origin import Attempt, Origin, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult(Origin):
    """One text's vector. Only vectors of an equal `space` may be compared."""

    vector: list[float] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBatch(Origin):
    """Vectors of one request, float32 (n, d), in the order of its texts."""

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedManyResult:
    """Vectors of many texts, float32 (n, d), in their order, all of one `space` (None when there were no texts).

    `served` counts texts by who embedded them.
    """

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str | None
    usage: Usage
    served: dict[str, int]
    attempts: tuple[Attempt, ...] = ()
