"""Fields of another server's API that this node does not implement.

The `rules` of a body name those that would change the answer: they are refused, except at values that ask for nothing.
Others are ignored and listed in the reply, or refused where the node is strict (`unknown_fields = "reject"`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from worker_node.core.errors import UnsupportedParameter

_SHOWN_FIELDS = 16
_NAME_LENGTH = 64
_MOST_LABELS = 64
# What a token of RFC 8941 may hold, so that a name cannot break out of the header.
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.:-]")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that would change the answer and is not implemented here, for this reason.

    Values that ask for nothing pass: null, false, 0, an empty string, list or object, and the `neutral` values.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


Table = Mapping[str, Unsupported]


@dataclass(slots=True)
class Ignored:
    """The fields of one request that had no effect, by path without indices; at most a few are kept by name.

    `limited` are fields that asked for more than is available, with what is available.
    """

    names: set[str] = field(default_factory=set)
    limited: dict[str, int] = field(default_factory=dict)
    more: int = 0

    def add(self, path: str) -> None:
        """Record that a field was ignored."""
        name = _NO_TOKEN.sub("_", path)[:_NAME_LENGTH]
        if name in self.names:
            return
        if len(self.names) < _SHOWN_FIELDS:
            self.names.add(name)
        else:
            self.more += 1

    def header(self) -> str:
        """The value of `X-NPU-Node-Ignored`, a list of RFC 8941: `service_tier, top_logprobs;limited=1`."""
        items = sorted(self.names)
        items += [f"{name};limited={count}" for name, count in sorted(self.limited.items())]
        if self.more:
            items.append(f"and-more;fields={self.more}")
        # A token begins with a letter or a star.
        return ", ".join(item if item[:1].isalpha() else f"*{item}" for item in items)


def reject_required_device(fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedParameter for the node's own header sent as a field: a demand is never ignored."""
    if fields.get("require_device"):
        raise UnsupportedParameter(
            "require_device: it is no field of this request; send it as the header X-NPU-Require-Device",
            param="require_device",
        )


def sift(body: BaseModel, ignored: Ignored, mode: Literal["ignore", "reject"]) -> None:
    """Judge every field of a validated body that its models do not declare. Raises UnsupportedParameter."""
    reject_required_device(body.model_extra or {})
    _sift(body, "", ignored, mode)


def _sift(body: BaseModel, where: str, ignored: Ignored, mode: Literal["ignore", "reject"]) -> None:
    rules: Table = getattr(body, "rules", {})
    for name, value in (body.model_extra or {}).items():
        path = f"{where}{name}"
        shown = path[:200]
        if (rule := rules.get(name)) is not None:
            if value and value not in rule.neutral:
                raise UnsupportedParameter(f"{shown}: {rule.reason}", param=shown)
        elif mode == "reject":
            raise UnsupportedParameter(
                f"{shown}: it has no effect here, and the node is set to refuse such fields "
                '(unknown_fields = "reject"); leave it out',
                param=shown,
            )
        elif value is not None:
            ignored.add(path)
    # What was not sent is a default and holds nothing of the client's.
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            _sift(value, f"{where}{name}.", ignored, mode)
        elif isinstance(value, list) and value and not isinstance(value[0], str | int):
            for part in value:
                if isinstance(part, BaseModel):
                    _sift(part, f"{where}{name}.", ignored, mode)


def labels(ignored: Ignored, seen: set[str]) -> set[str]:
    """The fields as metric labels: the first names that were `seen`, all others as `other`."""
    found = set()
    for path in ignored.names | ignored.limited.keys():
        name = path.rpartition(".")[2]
        if len(seen) < _MOST_LABELS:
            seen.add(name)
        found.add(name if name in seen else "other")
    return found
