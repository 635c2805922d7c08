"""Sampling defaults for what a request leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_node.core.types import Sampling


def completed(sampling: Sampling, of_the_model: Mapping[str, Any] | None, limit: int) -> Sampling:
    """The sampling with its open fields filled in: by its dialect's defaults, else by those `of_the_model`.

    None of these leaves it greedy. A default length is at most `limit` tokens, and at least what the request demands.
    """
    if of_the_model is None:
        return sampling
    defaults = of_the_model if sampling.dialect_defaults is None else sampling.dialect_defaults
    filled = {field: value for field, value in defaults.items() if field in sampling.open_fields}
    if (length := filled.get("max_new_tokens")) is not None:
        filled["max_new_tokens"] = max(min(length, limit), sampling.min_tokens)
    return replace(sampling, **filled, open_fields=frozenset())
