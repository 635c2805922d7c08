"""The numbers of a request, checked before anything is sent: a wrong one could lift a limit. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from backend_client.errors import InvalidArgument

# The least value of each field. Where it is an int, the field takes whole numbers only. Local servers call -1 "all".
_LEAST: Mapping[str, float] = {
    "max_new_tokens": 1,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "max_output_tokens": 1,
    "max_tokens_per_doc": 1,
    "min_tokens": 0,
    "n": 1,
    "best_of": 1,
    "top_n": 1,
    "top_k": -1,
    "top_logprobs": 0,
    "dimensions": 1,
    "num_ctx": 1,
    "n_predict": -1,
    "truncate_prompt_tokens": -1,
    "temperature": 0.0,
    "top_p": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 0.0,
    "repeat_penalty": 0.0,
    "presence_penalty": -math.inf,
    "frequency_penalty": -math.inf,
}


def check_numbers(fields: Mapping[str, Any], path: str = "") -> None:
    """Raise InvalidArgument for a wrong number in the body of a request to `path`. None means not given."""
    for name in fields.keys() & _LEAST.keys():
        value, least = fields[name], _LEAST[name]
        if path == "/v1/completions" and name == "max_tokens":
            # With `echo`, for the prompt alone.
            least = 0
        whole = type(least) is int
        if value is None or (_is_number(value, whole=whole) and value >= least):
            continue
        kind = "whole" if whole else "finite"
        bound = "" if math.isinf(least) else f" of at least {least:g}"
        given = value if _is_number(value, whole=False) and abs(value) < 10**15 else type(value).__name__
        raise InvalidArgument(f"{name} must be a {kind} number{bound}, not {given}", param=name)


def _is_number(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return False
    return isinstance(value, Integral) or math.isfinite(value)
