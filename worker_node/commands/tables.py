"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width under a head."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def megabytes(size: int | None) -> str:
    """A size in bytes; a dash where it is not known."""
    return "-" if size is None else f"{size / 1e6:.0f} MB"


def serving_device(model: Mapping[str, Any]) -> str | None:
    """The device on which a model of GET /models is loaded; None where it is not."""
    if not model.get("loaded"):
        return None
    return next((str(place["device"]) for place in model["devices"] if place["state"] == "ready"), None)
