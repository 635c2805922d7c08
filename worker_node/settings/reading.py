"""Reads all settings of a node: the TOML file, then `NPU_NODE_*` in the environment, then flags.

Everything is parsed and validated before anything is returned, so that a node can read its settings again while it
serves (`SettingsSource.read`) and go on with the old ones when the new ones are wrong.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, SettingsError

from worker_node.core.errors import ConfigurationError
from worker_node.settings.model import ModelSettings, PlacementSettings, known_options
from worker_node.settings.node import NodeSettings

_SIMILAR = 0.6


def _advice(key: str, known: Collection[str]) -> str:
    """The name that the user may have meant by `key`; an empty string when none is near."""
    near = difflib.get_close_matches(key.strip().lower().replace("-", "_"), known, 1, _SIMILAR)
    return near[0] if near else ""


# Lists whose items are tables of their own.
_TABLES = frozenset({"models", "models.placements"})


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One wrong setting. `source` is the file, the environment variable or the flag; `key` is its path there."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.key, self.message) if part)


class InvalidSettings(ConfigurationError):
    """The settings cannot be used; `problems` has every problem that was found."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        super().__init__("the settings are wrong:\n  " + "\n  ".join(map(str, problems)))
        self.problems = tuple(problems)


def _explain(
    error: ValidationError, document: Mapping[str, Any], source_of: Callable[[str], str]
) -> list[SettingProblem]:
    """Every problem of a failed validation of NodeSettings; `source_of` names what gave a setting of the node."""
    details = error.errors(include_input=False, include_url=False)
    paths = [detail["loc"] for detail in details]
    # Pydantic counts a list's wrong items as missing from it, too.
    details = [detail for detail in details if detail["type"] != "too_short" or not _has_below(detail["loc"], paths)]
    return [
        SettingProblem(
            source_of(str(detail["loc"][0]) if detail["loc"] else ""),
            _key(detail["loc"]),
            _message(detail, document),
        )
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


def _message(detail: ErrorDetails, document: Mapping[str, Any]) -> str:
    path = detail["loc"]
    if detail["type"] == "tuple_type":
        name = ".".join(element for element in path if isinstance(element, str))
        if name in _TABLES and isinstance(_value(document, path), dict):
            return f"must be a list of tables: write [[{name}]], with two brackets, instead of [{name}]"
        return "must be a list"
    if detail["type"] != "extra_forbidden":
        return detail["msg"].removeprefix("Value error, ")
    names: Mapping[tuple[str, ...], Sequence[str]] = {
        (): list(NodeSettings.model_fields),
        ("models",): [*(ModelSettings.model_fields.keys() - {"options"}), *known_options()],
        ("models", "placements"): list(PlacementSettings.model_fields),
    }
    table = tuple(element for element in path[:-1] if isinstance(element, str))
    if near := _advice(str(path[-1]), names.get(table, ())):
        return f"unknown key; did you mean {near}?"
    known = ", ".join(sorted(names.get(table, ())))
    return f"unknown key; known are {known} (docs/coming-from.md has the names for keys of other servers)"


PREFIX = "NPU_NODE_"
# Read by the commands that talk to a running node, not by the node.
OF_COMMANDS = frozenset({"NPU_NODE_URL", "NPU_NODE_API_KEY"})
# Kubernetes gives every container of a namespace such variables for a service that is called npu-node.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def given_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that set something, by the name of the setting; upper and lower case count alike."""
    names = {(PREFIX + field).upper(): field for field in NodeSettings.model_fields}
    return {names[name.upper()]: name for name in environment if name.upper() in names}


def check_variables(environment: Mapping[str, str]) -> list[SettingProblem]:
    """One problem for each variable that begins like ours and sets nothing."""
    known = {(PREFIX + field).upper() for field in NodeSettings.model_fields} | OF_COMMANDS
    problems = []
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        key = name[len(PREFIX) :]
        if _SERVICE_LINK.fullmatch(key.upper()):
            continue
        near = _advice(key, list(NodeSettings.model_fields))
        hint = f"did you mean {PREFIX}{near.upper()}?" if near else "remove it"
        problems.append(SettingProblem(name, "", f"unknown variable; {hint}"))
    return problems


_FIELD = re.compile(r'field "(\w+)"')
_NO_FLAGS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where a node's settings come from. `config` is the TOML file; `flags` go before everything else."""

    config: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> NodeSettings:
        """Read and validate everything, now. Raises InvalidSettings, which names each file and key."""
        if self.config is None:
            return parse_settings("", None, self.flags)
        try:
            text = self.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror or "cannot be opened" if isinstance(error, OSError) else "is not UTF-8"
            raise InvalidSettings([SettingProblem(str(self.config), "", f"cannot be read: {reason}")]) from None
        return parse_settings(text, str(self.config), self.flags)


def parse_settings(text: str, file: str | None = None, flags: Mapping[str, Any] = _NO_FLAGS) -> NodeSettings:
    """Return the settings that a TOML text, the environment and `flags` give.

    `file` names the text in errors. Reads nothing but the environment and the file of `api_keys_file`.
    Raises InvalidSettings with every problem.
    """
    document = _parse(text, file or "settings")
    if file is not None:
        _anchor_paths(document, Path(file).parent)
    variables = given_variables(os.environ)
    problems = check_variables(os.environ)
    try:
        environment = EnvSettingsSource(NodeSettings)()
        settings = NodeSettings(**{**document, **environment, **flags})
    except SettingsError as error:
        field = _FIELD.search(str(error))
        problems.append(SettingProblem(variables[field[1]] if field else "the environment", "", "is not valid JSON"))
    except ValidationError as error:

        def source_of(setting: str) -> str:
            if setting in flags:
                return "--" + setting.replace("_", "-")
            return variables.get(setting, file or "settings")

        problems += _explain(error, document, source_of)
    if problems:
        raise InvalidSettings(problems)
    settings.note_file(given=bool(document))
    if file is not None and "models" not in variables and "models" not in flags:
        for index, model in enumerate(settings.models):
            model.note_origin(f"{file}: models[{index}]")
    return settings


def _anchor_paths(document: dict[str, Any], directory: Path) -> None:
    """Relative paths of models are meant from the file's directory."""
    models = document.get("models")
    for model in models if isinstance(models, list) else []:
        path = model.get("path") if isinstance(model, dict) else None
        if isinstance(path, str) and path:
            model["path"] = str(directory / Path(path).expanduser())


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings([SettingProblem(file, "", f"not valid TOML: {error}")]) from None
    except RecursionError:
        raise InvalidSettings([SettingProblem(file, "", "not valid TOML: nested too deeply")]) from None
