"""Whether a model suits an NPU, as far as its small files and its name say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_node.models.catalog import SourceFormat

# What the NPU compiler takes for generation: int4, symmetric, one scale a row or groups of a multiple of this.
_GROUP = 64
# Those of the models that were run on the NPU path, or are published for NPUs.
_HEAD_SIZES = frozenset({64, 80, 96, 128})
_MARKS = (
    (re.compile(r"int4-cw|int4-sym|int4_sym|int4-gq|sym[_-]?(cw|g128)", re.IGNORECASE), True, "int4 symmetric"),
    (re.compile(r"nf4", re.IGNORECASE), True, "nf4, which NPUs take from Lunar Lake on"),
    (re.compile(r"int4-asym|int4_asym", re.IGNORECASE), False, "int4 asymmetric"),
    (re.compile(r"int8|fp16|fp8|bf16", re.IGNORECASE), False, "not int4"),
)
_ALTERNATIVE = "NPUs want int4 symmetric, channel-wise or in groups: look for -int4-cw-ov"


@dataclass(frozen=True, slots=True)
class Suitability:
    """`suitable` is None where nobody can tell before it is tried; `reasons` in words."""

    suitable: bool | None
    reasons: tuple[str, ...]


def npu_verdict(
    name: str, source_format: SourceFormat, weights: Mapping[str, Any], *, generates: bool, head_size: int | None
) -> Suitability:
    """Judge a model by its repository's `name`, and by `weights`, the `quantization_config` of openvino_config.json."""
    if not generates:
        return Suitability(suitable=True, reasons=("an encoder: it runs in f16 with static shapes",))
    suitable, reason = _weights(name, source_format, weights)
    reasons = [reason]
    if head_size is not None and head_size not in _HEAD_SIZES:
        suitable = None if suitable else suitable
        reasons.append(f"head size {head_size} was not tried on NPUs ({', '.join(map(str, sorted(_HEAD_SIZES)))} were)")
    return Suitability(suitable, tuple(reasons))


def _weights(name: str, source_format: SourceFormat, weights: Mapping[str, Any]) -> tuple[bool | None, str]:
    if source_format is SourceFormat.GGUF:
        return True, f"converted here to int4 and int8, symmetric, in groups of {_GROUP}"
    bits, symmetric, group = weights.get("bits"), weights.get("sym"), weights.get("group_size")
    if bits is None:
        return _by_name(name)
    if bits != 4:
        return False, f"the weights have {bits} bits; {_ALTERNATIVE}"
    if not symmetric:
        return False, f"the weights are int4 asymmetric; {_ALTERNATIVE}"
    if group == -1:
        return True, "int4 symmetric, channel-wise"
    fits = isinstance(group, int) and group > 0 and group % _GROUP == 0
    return fits, f"int4 symmetric in groups of {group}" + ("" if fits else f", which is no multiple of {_GROUP}")


def _by_name(name: str) -> tuple[bool | None, str]:
    for mark, suitable, words in _MARKS:
        if mark.search(name):
            return suitable, f"by its name: {words}" + ("" if suitable else f"; {_ALTERNATIVE}")
    return None, "nothing says how the weights are stored; most repositories that end in -int4-ov are asymmetric"
