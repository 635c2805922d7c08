"""One result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`error`: the NPU cannot be used, or not be proven. `warning`: it works worse, or may stop working."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`id` is stable; `fix` is what to type or do, empty where nothing is wrong."""

    id: str
    severity: Severity
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    """The check passed."""
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    """Degraded but usable."""
    return Finding(check, Severity.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """The NPU cannot be used, or not be proven."""
    return Finding(check, Severity.ERROR, found, fix)
