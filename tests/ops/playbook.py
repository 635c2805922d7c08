"""Running playbooks against containers, and reading what came of it."""

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "ansible"
# A limit for a hang: bare machines take minutes each, and a busy controller several times as long.
HANG_S = 3600
BIN = Path(os.environ.get("NPU_OPS_VENV", ROOT / ".venv-ops")) / "bin"
_ONE_ROLE = """
- name: One role
  hosts: machine
  roles: [ROLE]
"""
_RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a playbook came to; `changed` and `failed` are counts of tasks by host."""

    status: int
    output: str
    changed: dict[str, int]
    failed: dict[str, int]

    @property
    def text(self):
        """The output with its lines joined: messages are broken where they are too wide."""
        return " ".join(self.output.split())

    def changed_tasks(self):
        """The tasks that changed something, with their host, for a message."""
        task, found = "", []
        for line in self.output.splitlines():
            if line.startswith(("TASK [", "RUNNING HANDLER [")):
                task = line.split("[", 1)[1].rsplit("]", 1)[0]
            elif line.startswith("changed: "):
                found.append(f"{task}: {line}")
        return found


def succeeded(outcome):
    assert outcome.status == 0, outcome.output[-6000:]
    return outcome


def failed(outcome, *said):
    assert outcome.status != 0, outcome.output[-6000:]
    for words in said:
        assert words in outcome.text
    return outcome


def unchanged(outcome):
    """It succeeded and found everything as it should be."""
    succeeded(outcome)
    assert not any(outcome.changed.values()), outcome.changed_tasks()


def write_inventory(path, groups):
    """An inventory of `groups`, {group: {host: variables}}; the variables say how to reach the host, as root."""
    common = {"ansible_become": False, "ansible_python_interpreter": "/usr/bin/python3"}
    inventory = {
        group: {"hosts": {host: common | variables for host, variables in hosts.items()}}
        for group, hosts in groups.items()
    }
    path.write_text(json.dumps(inventory, indent=1), encoding="utf-8")
    return path


@functools.cache
def _control_paths():
    """A directory for this process' SSH connections: other runs use the same addresses. Its path is short."""
    directory = tempfile.mkdtemp(prefix="npu-ops-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def start(inventory, *arguments, playbook=ANSIBLE / "site.yml", **variables):
    """Start a run of a playbook; `variables` go before those of the inventory."""
    command = [BIN / "ansible-playbook", "-i", inventory, playbook, "--extra-vars", json.dumps(variables), *arguments]
    environment = os.environ | {
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": _control_paths(),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ANSIBLE,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, timeout=HANG_S):
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the playbook did not end within {timeout} s:\n{output[-6000:]}") from None
    recap = {host: (int(changed), int(failed) + int(gone)) for host, _, changed, gone, failed in _RECAP.findall(output)}
    return Outcome(
        process.returncode,
        output,
        {host: changed for host, (changed, _) in recap.items()},
        {host: failed for host, (_, failed) in recap.items()},
    )


def play(inventory, *arguments, timeout=HANG_S, **variables):
    return finish(start(inventory, *arguments, **variables), timeout)


def role_runner(directory, variables, timeout=HANG_S):
    """A function that runs one role on the machine which these variables reach; `directory` takes its playbook."""
    inventory = write_inventory(directory / "hosts.json", {"machine": {"machine": variables}})

    def run_role(role, *arguments, **extra):
        playbook = directory / "play.yml"
        playbook.write_text(_ONE_ROLE.replace("ROLE", role), encoding="utf-8")
        return play(inventory, *arguments, playbook=playbook, timeout=timeout, **extra)

    return run_role
