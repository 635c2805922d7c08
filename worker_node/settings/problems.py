"""What is wrong with settings: each problem with the place that it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from worker_node.errors import ConfigurationError
from worker_node.settings.model import ModelSettings, PlacementSettings
from worker_node.settings.names import advice
from worker_node.settings.options import known_options
from worker_node.settings.toml_lines import known_part, line_of

# Lists whose items are tables of their own.
_TABLES = frozenset({"models", "models.placements"})


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One wrong setting. `source` is the file, the environment variable or the flag; `line` counts from 1."""

    source: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (where, self.key, self.message) if part)


class InvalidSettings(ConfigurationError):
    """The settings cannot be used; `problems` has every problem that was found."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        super().__init__("the settings are wrong:\n  " + "\n  ".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Given:
    """What was given where: the file's text and values (`file` None: there is none), the environment, the flags.

    `variables` maps the names of settings to those of environment variables.
    """

    file: str | None
    text: str
    document: Mapping[str, Any]
    variables: Mapping[str, str]
    flags: Mapping[str, Any]

    def place(self, path: Sequence[str | int]) -> tuple[str, int | None]:
        """The source of the setting at `path`, and its line in the file."""
        top = str(path[0]) if path else ""
        if top in self.flags:
            return "--" + top.replace("_", "-"), None
        if top in self.variables:
            return self.variables[top], None
        if self.file is None:
            return "settings", None
        known = known_part(self.document, path)
        return self.file, line_of(self.text, known) if known else None


def explain(error: ValidationError, given: Given, known: Sequence[str]) -> list[SettingProblem]:
    """Every problem of a failed validation of NodeSettings, whose fields are `known`."""
    details = error.errors(include_input=False, include_url=False)
    paths = [detail["loc"] for detail in details]
    # Pydantic counts a list's wrong items as missing from it, too.
    details = [detail for detail in details if detail["type"] != "too_short" or not _has_below(detail["loc"], paths)]
    return [
        SettingProblem(*given.place(detail["loc"]), _key(detail["loc"]), _message(detail, known, given.document))
        for detail in details
    ]


def _value(document: Any, path: Sequence[str | int]) -> Any:
    for element in path:
        try:
            document = document[element]
        except (LookupError, TypeError):
            return None
    return document


def _has_below(path: Sequence[str | int], paths: Sequence[Sequence[str | int]]) -> bool:
    return any(len(other) > len(path) and tuple(other[: len(path)]) == tuple(path) for other in paths)


def _key(path: Sequence[str | int]) -> str:
    """`models[1].placements[0].device`."""
    return "".join(f"[{element}]" if isinstance(element, int) else f".{element}" for element in path).lstrip(".")


def _message(detail: ErrorDetails, node: Sequence[str], document: Mapping[str, Any]) -> str:
    path = detail["loc"]
    if detail["type"] == "tuple_type":
        name = ".".join(element for element in path if isinstance(element, str))
        if name in _TABLES and isinstance(_value(document, path), dict):
            return f"is a list of tables: write [[{name}]], with two brackets, instead of [{name}]"
        return "should be a list"
    if detail["type"] != "extra_forbidden":
        return detail["msg"].removeprefix("Value error, ")
    names: Mapping[tuple[str, ...], Sequence[str]] = {
        (): node,
        ("models",): [*(ModelSettings.model_fields.keys() - {"options"}), *known_options()],
        ("models", "placements"): list(PlacementSettings.model_fields),
    }
    table = tuple(element for element in path[:-1] if isinstance(element, str))
    hint = advice(str(path[-1]), names.get(table, ()), of_a_model="models" in table)
    return f"unknown key; {hint}" if hint else f"unknown key; known are {', '.join(sorted(names.get(table, ())))}"
