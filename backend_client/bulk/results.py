"""The results of serving a chunk: a column of results for its rows, and the rows that were refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from backend_client.bulk.optional import need
from backend_client.results import Origin

_INTEGERS = ("num_input_tokens", "num_generated_tokens", "npu_busy_us")
_TEXTS = ("finish_reason", "model", "node", "device", "space", "error")


@dataclass(slots=True)
class Results:
    """Results of `count` rows, filled part by part. `values` are Vectors, or a list of texts.

    `refused` says of a row why it has none. `tokens` counts those of all inputs; `served` rows by node and device.
    """

    count: int
    values: Any = None
    tokens: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    num_input_tokens: list[int | None] = field(default_factory=list)
    num_generated_tokens: list[int | None] = field(default_factory=list)
    finish_reason: list[str | None] = field(default_factory=list)
    model: list[str | None] = field(default_factory=list)
    node: list[str | None] = field(default_factory=list)
    device: list[str | None] = field(default_factory=list)
    emulated: list[bool | None] = field(default_factory=list)
    space: list[str | None] = field(default_factory=list)
    npu_busy_us: list[int | None] = field(default_factory=list)
    error: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the columns as long as there are rows."""
        for name in (*_INTEGERS, *_TEXTS, "emulated"):
            setattr(self, name, [None] * self.count)
        self.error = [""] * self.count

    def put_origin(self, start: int, stop: int, origin: Origin) -> None:
        """Record who served rows in one request. Its NPU time is divided among them so that the sum is exact."""
        count = stop - start
        self.model[start:stop] = [origin.model] * count
        self.node[start:stop] = [origin.node] * count
        self.device[start:stop] = [origin.device] * count
        self.emulated[start:stop] = [origin.emulated] * count
        if origin.npu_busy_delta_us is not None:
            share, rest = divmod(origin.npu_busy_delta_us, count)
            self.npu_busy_us[start:stop] = [share + 1] * rest + [share] * (count - rest)
        self.served[f"{origin.node} {origin.device or origin.source}"] += count

    def columns(self) -> dict[str, Any]:
        """The columns of the output that are not the input's or the values', as Arrow arrays."""
        pa = need("pyarrow")
        made = {name: _array(getattr(self, name), pa.int64()) for name in _INTEGERS}
        made |= {name: _array(getattr(self, name), pa.string()) for name in _TEXTS}
        made["emulated"] = _array(self.emulated, pa.bool_())
        return made


def _array(values: list[Any], kind: Any) -> Any:
    """The Arrow array. Most columns of a chunk have one value, which need not be converted row by row."""
    pa = need("pyarrow")
    if values and values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), len(values))
    return pa.array(values, kind)
