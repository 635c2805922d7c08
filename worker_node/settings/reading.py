"""Reads all settings of a node: the TOML file, then `NPU_NODE_*` in the environment, then flags.

Everything is parsed and validated before anything is returned, so that a node can read its settings again while it
serves (`SettingsSource.read`) and go on with the old ones when the new ones are wrong. Variables of npu-proxy that mean
the same here count for less than all of these (docs/coming-from.md).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, SettingsError

from worker_node.core.errors import ConfigurationError
from worker_node.settings.model import ModelSettings, PlacementSettings, known_options
from worker_node.settings.node import NodeSettings, read_text, reason
from worker_node.settings.npu_proxy import translated

# Lists whose items are tables of their own.
_TABLES = frozenset({"models", "models.placements"})


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One wrong setting. `source` is the file, the environment variable or the flag; `key` is its path there."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.source, self.key, self.message) if part)
        # A key of the file may hold escape codes, which must not reach a terminal.
        return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


class InvalidSettings(ConfigurationError):
    """The settings cannot be used; `problems` has every problem that was found."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        super().__init__("the settings are wrong:\n  " + "\n  ".join(map(str, problems)))
        self.problems = tuple(problems)


def _key(path: Sequence[str | int]) -> str:
    """`models[1].placements[0].device`; options of a model are keys of the same table."""
    keys = [element for element in path[:-1] if element != "options"] + list(path[-1:])
    return "".join(f"[{element}]" if isinstance(element, int) else f".{element}" for element in keys).lstrip(".")


def _message(detail: ErrorDetails) -> str:
    path = detail["loc"]
    if detail["type"] == "tuple_type":
        name = ".".join(element for element in path if isinstance(element, str))
        return f"must be a list of tables: write [[{name}]], with two brackets" if name in _TABLES else "must be a list"
    if detail["type"] != "extra_forbidden":
        return detail["msg"].removeprefix("Value error, ")
    names: Mapping[tuple[str, ...], Sequence[str]] = {
        (): list(NodeSettings.model_fields),
        ("models",): [*(ModelSettings.model_fields.keys() - {"options"}), *known_options()],
        ("models", "placements"): list(PlacementSettings.model_fields),
    }
    table = tuple(element for element in path[:-1] if isinstance(element, str))
    key = str(path[-1])
    if table == ("models",) and key in NodeSettings.model_fields:
        return "unknown key; it is one of the node: write it above the first [[models]]"
    if table == () and key in names["models",]:
        return "unknown key; it is one of a model: write it in [[models]]"
    near = difflib.get_close_matches(key.lower(), names.get(table, ()), 1)
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key; docs/settings.md has them all"


PREFIX = "NPU_NODE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
# Read by commands: where the settings are, and what those that talk to a running node need.
OF_COMMANDS = frozenset(
    PREFIX + name for name in ("CONFIG", "URL", "API_KEY", "CA_FILE", "CLIENT_CERT", "CLIENT_KEY", "LOG_LEVEL")
)
SYSTEM_FILE = Path("/etc/npu-node/node.toml")
# The store of the unit that runs with that file (config/systemd/npu-node.service).
SYSTEM_STORE = Path("/var/lib/npu-node/models")


def find_file(given: Path | None) -> Path | None:
    """`given`, else that of `NPU_NODE_CONFIG` (empty: none), else this user's file, else the machine's if readable."""
    named = os.environ.get(CONFIG_VARIABLE)
    if given is not None or named is not None:
        return given or (Path(named) if named else None)
    # A user without a home has none; Path.expanduser would raise.
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    own = Path(home, "npu-node", "node.toml")
    if os.access(own, os.F_OK):
        return own
    return SYSTEM_FILE if os.access(SYSTEM_FILE, os.R_OK) else None


# Kubernetes gives every container of a namespace such variables for a service that is called npu-node.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


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
        near = difflib.get_close_matches(key.lower(), NodeSettings.model_fields, 1)
        hint = f"did you mean {PREFIX}{near[0].upper()}?" if near else "remove it"
        problems.append(SettingProblem(name, "", f"unknown variable; {hint}"))
    return problems


_FIELD = re.compile(r'field "(\w+)"')
_NO_FLAGS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where a node's settings come from. `config` is the TOML file; `flags` go before everything else."""

    config: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    npu_proxy: bool = False

    def read(self) -> NodeSettings:
        """Read and validate everything, now. Raises InvalidSettings, which names each file and key."""
        if self.config is None:
            return parse_settings("", None, self.flags, npu_proxy=self.npu_proxy)
        try:
            text = read_text(self.config)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSettings([SettingProblem(str(self.config), "", f"cannot be read: {reason(error)}")]) from None
        return parse_settings(text, str(self.config), self.flags, npu_proxy=self.npu_proxy)

    def read_without_keys(self) -> NodeSettings:
        """As `read`, for commands that make no node reachable: a service's keys may be closed to this user."""
        return replace(self, flags={**self.flags, "allow_unauthenticated": True, "api_keys_file": None}).read()


def parse_settings(
    text: str, file: str | None = None, flags: Mapping[str, Any] = _NO_FLAGS, *, npu_proxy: bool = False
) -> NodeSettings:
    """Return the settings that a TOML text, the environment and `flags` give.

    `file` names the text in errors; with `npu_proxy` npu-proxy's defaults are the weakest. Reads nothing but the
    environment and the file of `api_keys_file`.
    Raises InvalidSettings with every problem.
    """
    document = _parse(text, file or "settings")
    models = document.get("models") if file is not None else None
    for model in models if isinstance(models, list) else []:
        path = model.get("path") if isinstance(model, dict) else None
        if isinstance(path, str) and path:
            # Relative paths of models are meant from the file's directory.
            model["path"] = str(Path(file or "").parent / Path(path).expanduser())
    # The variables that set something, by the name of the setting; upper and lower case count alike.
    names = {(PREFIX + field).upper(): field for field in NodeSettings.model_fields}
    variables = {names[name.upper()]: name for name in os.environ if name.upper() in names}
    taken = {
        name: found
        for name, found in translated(
            os.environ, profile=npu_proxy, store=flags.get("model_store") or document.get("model_store")
        ).items()
        if not (name in document or name in variables or name in flags)
    }
    variables |= {name: variable for name, (variable, _) in taken.items()}
    problems = check_variables(os.environ)
    try:
        environment = EnvSettingsSource(NodeSettings)()
        older = {name: value for name, (_, value) in taken.items()}
        settings = NodeSettings(**{**older, **document, **environment, **flags})
    except SettingsError as error:
        field = _FIELD.search(str(error))
        problems.append(SettingProblem(variables[field[1]] if field else "the environment", "", "is not valid JSON"))
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)
        sources = variables | {name: "--" + name.replace("_", "-") for name in flags}
        for detail in details:
            place = detail["loc"]
            deeper = [other["loc"] for other in details if len(other["loc"]) > len(place)]
            # Pydantic counts a list's wrong items as missing from it, too.
            if detail["type"] != "too_short" or not any(other[: len(place)] == place for other in deeper):
                source = sources.get(str(place[0]) if place else "", file or "settings")
                problems.append(SettingProblem(source, _key(place), _message(detail)))
    if problems:
        raise InvalidSettings(problems)
    settings.note_file(given=bool(document))
    if file is not None and "models" not in variables and "models" not in flags:
        for index, model in enumerate(settings.models):
            model.note_origin(f"{file}: models[{index}]")
    return settings


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings([SettingProblem(file, "", f"not valid TOML: {error}")]) from None
    except RecursionError:
        raise InvalidSettings([SettingProblem(file, "", "not valid TOML: nested too deeply")]) from None
