"""Validation errors of a body in words: where, and what was expected there, never what it holds.

Where a field may have several forms, pydantic lists the problems of each. Only those of the intended form are reported:
the one whose `type` or `role` fits, else the one with the fewest problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

_SHOWN = 3
_KINDS = ("type", "role")
_OBJECTS = frozenset({"model_type", "model_attributes_type"})
_EXPECTED = "Input should be "


@dataclass(frozen=True, slots=True)
class Problem:
    """`path` are keys and indices of the body; `forms` are those that were tried, each after so many parts of it."""

    path: tuple[int | str, ...]
    message: str
    kind: str
    forms: tuple[tuple[int, str], ...] = ()


def explain(error: ValidationError, body: Any) -> tuple[str, str | None]:
    """Return the message, and the path of the first problem."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    problems = _meant([_located(problem["loc"], problem["msg"], problem["type"], body) for problem in found])
    parts = [f"{where}: {p.message}" if (where := _path(p.path)) else p.message for p in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        parts.append(f"and {len(problems) - _SHOWN} more problems")
    return "; ".join(parts), _path(problems[0].path) or None


def _located(location: Sequence[int | str], message: str, kind: str, body: Any) -> Problem:
    """Take the names of forms out of a location: what is no key of the body at its place."""
    path: list[int | str] = []
    forms: list[tuple[int, str]] = []
    here = body
    for number, part in enumerate(location):
        inside = isinstance(here, dict) and part in here
        inside = inside or (isinstance(here, list) and isinstance(part, int) and part < len(here))
        missing = kind == "missing" and number == len(location) - 1
        if not inside and not missing:
            forms.append((len(path), str(part)))
            continue
        path.append(part)
        here = here[part] if inside else None
    if kind in _OBJECTS:
        # Pydantic's message names a class of ours.
        message = f"{_EXPECTED}an object"
    return Problem(tuple(path), message, kind, tuple(forms))


def _meant(problems: list[Problem], level: int = 0) -> list[Problem]:
    """Of each field with several forms, the problems of one form; `level` counts such fields from the outside."""
    told: list[Problem] = []
    groups: dict[tuple[int | str, ...], list[Problem]] = {}
    for problem in problems:
        if len(problem.forms) <= level:
            told.append(problem)
        else:
            groups.setdefault(problem.path[: problem.forms[level][0]], []).append(problem)
    for group in groups.values():
        told += _of_one_form(group, level)
    return told


def _of_one_form(problems: list[Problem], level: int) -> list[Problem]:
    forms: dict[str, list[Problem]] = {}
    for problem in problems:
        forms.setdefault(problem.forms[level][1], []).append(problem)
    possible = [form for form in forms.values() if not any(_is_another_form(problem, level) for problem in form)]
    if possible:
        return min((_meant(form, level + 1) for form in possible), key=len)
    kinds = [problem for problem in problems if problem.path[-1:] and problem.path[-1] in _KINDS]
    first = (kinds or problems)[0]
    expected = dict.fromkeys(p.message for p in (kinds or problems) if p.path == first.path)
    if all(message.startswith(_EXPECTED) for message in expected):
        return [Problem(first.path, _EXPECTED + " or ".join(m.removeprefix(_EXPECTED) for m in expected), first.kind)]
    return [Problem(first.path, " or ".join(expected), first.kind)]


def _is_another_form(problem: Problem, level: int) -> bool:
    """Whether the value shows that another form was intended: by its type, or by its `type` field."""
    inner = problem.path[problem.forms[level][0] :]
    if not inner:
        return len(problem.forms) == level + 1
    if len(inner) != 1 or inner[0] not in _KINDS:
        return False
    return problem.kind == "literal_error" or (problem.kind == "missing" and inner[0] == "type")


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:100]}" if path else part[:100]
    return path
