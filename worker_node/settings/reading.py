"""Reads all settings of a node: the TOML file, then `NPU_NODE_*` in the environment, then flags.

Everything is parsed and validated before anything is returned, so that a node can read its settings again while it
serves (`SettingsSource.read`) and go on with the old ones when the new ones are wrong.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from worker_node.settings import npu_proxy
from worker_node.settings.model import Origin
from worker_node.settings.node import NodeSettings
from worker_node.settings.problems import Given, InvalidSettings, SettingProblem, explain
from worker_node.settings.toml_lines import error_line
from worker_node.settings.variables import check_variables, given_variables

_FIELD = re.compile(r'field "(\w+)"')
_NO_FLAGS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where a node's settings come from. `config` is the TOML file; `flags` go before everything else."""

    config: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> NodeSettings:
        """Read and validate everything, now. Raises InvalidSettings, which names each file, line and key."""
        if self.config is None:
            return parse_settings("", None, self.flags)
        try:
            text = self.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror or "cannot be opened" if isinstance(error, OSError) else "is not UTF-8"
            raise InvalidSettings([SettingProblem(str(self.config), None, "", f"cannot be read: {reason}")]) from None
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
    taken = {
        name: found
        for name, found in npu_proxy.inherited(os.environ).items()
        if not (name in document or name in variables or name in flags)
    }
    variables |= {name: variable for name, (variable, _) in taken.items()}
    given = Given(file, text, document, variables, flags)
    problems = check_variables(os.environ)
    try:
        environment = EnvSettingsSource(NodeSettings)()
        older = {name: value for name, (_, value) in taken.items()}
        settings = NodeSettings(**{**older, **document, **environment, **flags})
    except SettingsError as error:
        field = _FIELD.search(str(error))
        problems.append(
            SettingProblem(variables[field[1]] if field else "the environment", None, "", "is not valid JSON")
        )
    except ValidationError as error:
        problems += explain(error, given, list(NodeSettings.model_fields))
    if problems:
        raise InvalidSettings(problems)
    settings.note_file(given=bool(document))
    if file is not None and "models" not in variables and "models" not in flags:
        for index, model in enumerate(settings.models):
            model.read_from(Origin(file, text, index))
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
        reason = str(error).partition(" (at ")[0]
        raise InvalidSettings(
            [SettingProblem(file, error_line(error, text), "", f"not valid TOML: {reason}")]
        ) from None
    except RecursionError:
        raise InvalidSettings([SettingProblem(file, None, "", "not valid TOML: nested too deeply")]) from None
