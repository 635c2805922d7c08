"""The environment variables of a node: which ones count, and what is said about one that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker_node.settings.names import advice
from worker_node.settings.node import NodeSettings
from worker_node.settings.problems import SettingProblem

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
        hint = advice(key, list(NodeSettings.model_fields))
        problems.append(SettingProblem(name, None, "", f"unknown variable; {_as_variable(hint) or 'remove it'}"))
    return problems


def _as_variable(hint: str) -> str:
    """The advice on a key, as advice on a variable."""
    near = re.fullmatch(r"did you mean (\w+)\?", hint)
    return f"did you mean {PREFIX}{near[1].upper()}?" if near else hint
