"""Groups of settings, made from the options of the same name."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    create_model,
)

from backend_client.options import (
    LONGEST_S,
    BatchOptions,
    BreakerOptions,
    ClientOptions,
    FallbackOptions,
    HedgeOptions,
    ProbeOptions,
    RetryOptions,
    Timeouts,
)


def _section(options: type, **limits: Any) -> type[BaseModel]:
    """The settings of a group of options: its fields and defaults, each positive unless `limits` says otherwise.

    No time is longer than `LONGEST_S`.
    """
    parts: dict[str, Any] = {}
    hints = get_type_hints(options)
    for item in fields(options):
        rules: dict[str, Any] = limits.get(item.name, {"gt": 0})
        if isinstance(item.default, float):
            rules = {"le": LONGEST_S, **rules}
        parts[item.name] = hints[item.name], Field(default=item.default, **rules)
    config = ConfigDict(extra="forbid", frozen=True)
    return create_model(
        f"{options.__name__}Settings", __config__=config, __doc__=f"See `options.{options.__name__}`.", **parts
    )


DEFAULTS = ClientOptions()


_MAY_BE_ZERO = {name: {"ge": 0} for name in ("per_request", "per_second", "initial", "patience", "pause")}


class TimeoutSettings(_section(Timeouts, share={"gt": 0, "lt": 1})):  # type: ignore[misc]  # a model made from the options
    """See `options.Timeouts`."""


class ProbeSettings(_section(ProbeOptions, jitter={"ge": 0, "lt": 1}, idle_after={"ge": 0})):  # type: ignore[misc]  # a model made from the options
    """See `options.ProbeOptions`."""


class BreakerSettings(_section(BreakerOptions, jitter={"ge": 0, "lt": 1}, slow_start={"ge": 0})):  # type: ignore[misc]  # a model made from the options
    """See `options.BreakerOptions`."""


class RetrySettings(_section(RetryOptions, **_MAY_BE_ZERO)):  # type: ignore[misc]  # a model made from the options
    """See `options.RetryOptions`."""


class HedgeSettings(_section(HedgeOptions, percentile={"gt": 0, "lt": 1})):  # type: ignore[misc]  # a model made from the options
    """See `options.HedgeOptions`."""


class BatchSettings(_section(BatchOptions)):  # type: ignore[misc]  # a model made from the options
    """See `options.BatchOptions`."""


class FallbackSettings(_section(FallbackOptions, share={"ge": 0, "lt": 1}, longest={"ge": 0})):  # type: ignore[misc]  # a model made from the options
    """See `options.FallbackOptions`."""


def options_problem(options: ClientOptions) -> str | None:
    """What cannot be meant in options that were not made from settings, or None."""
    for item in fields(options):
        group, default = getattr(options, item.name), getattr(DEFAULTS, item.name)
        values = {item.name: group}
        if is_dataclass(default):
            if not isinstance(group, type(default)):
                return f"options.{item.name} is {type(group).__name__}, not {type(default).__name__}"
            values = {f"{item.name}.{part.name}": getattr(group, part.name) for part in fields(group)}
        for name, value in values.items():
            longest = LONGEST_S if isinstance(value, float) else math.inf
            if value is not None and (not isinstance(value, int | float) or not 0 <= value <= longest):
                return f"options.{name} must be a number of at least 0, and a time at most {LONGEST_S:.0f} s"
    return None
