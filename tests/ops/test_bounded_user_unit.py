"""The unit of the bounded jobs under a user's own systemd, installed by hand as its first lines tell."""

import json

import pytest

from tests.ops.conftest import GENERATOR
from tests.ops.containers import DEBIAN_13
from tests.ops.playbook import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

UNIT = ROOT / "config" / "systemd" / "npu-node-bounded.service"
ENVIRONMENT = f"NPU_NODE_NPU_EMULATION=1\nOV_GENAI_NPU_MODEL=/srv/models/{GENERATOR}\n"
ASK = """
import json, sys, urllib.request
body = json.dumps({"job": "title", "input": "Build 4812 failed at 03:12: the disk of runner 7 is full."}).encode()
request = urllib.request.Request("http://127.0.0.1:18820/v1/worker/generate", data=body if sys.argv[1:] else None)
if not sys.argv[1:]:
    request.full_url = "http://127.0.0.1:18820/healthz"
print(urllib.request.urlopen(request, timeout=500).read().decode())
"""


@pytest.fixture
def alice(fleet):
    """A function that runs a command as a user of the node's machine whose systemd lingers; her home holds the unit."""
    machine = fleet.machines[DEBIAN_13.name]
    home = "/home/alice"
    unit, environment = f"{home}/.config/systemd/user/{UNIT.name}", f"{home}/.config/npu-node/bounded.env"
    script = f"""
    set -eu
    useradd --create-home alice
    mkdir -p {home}/.config/systemd/user {home}/.config/npu-node {home}/.local/share/npu-node {home}/.cache
    ln -s /opt/npu-node/current {home}/.local/share/npu-node/venv
    printf %s "$1" > {unit}
    printf %s "$2" > {environment}
    chown -R alice: {home}
    loginctl enable-linger alice
    for i in $(seq 1000); do [ -S /run/user/$(id -u alice)/bus ] && exit 0; sleep 0.5; done
    echo "no bus of alice's systemd: $(systemctl status user@$(id -u alice))" >&2
    exit 1
    """
    machine.run("sh", "-c", script, "sh", UNIT.read_text(encoding="utf-8"), ENVIRONMENT)
    number = machine.run("id", "-u", "alice").stdout.strip()
    try:
        yield lambda *command, **options: machine.run(
            *("runuser", "-u", "alice", "--", "env", f"XDG_RUNTIME_DIR=/run/user/{number}", f"HOME={home}"),
            *command,
            **options,
        )
    finally:
        machine.run("loginctl", "disable-linger", "alice", check=False)
        machine.run("systemctl", "stop", f"user@{number}.service", check=False)
        machine.run("userdel", "--remove", "alice", check=False)


def test_the_unit_runs_for_a_user_and_proves_what_it_generated(alice):
    alice("systemctl", "--user", "daemon-reload")
    started = alice("systemctl", "--user", "start", "npu-node-bounded", check=False)
    log = alice("journalctl", "--user", "--unit=npu-node-bounded", "--no-pager", check=False)
    assert started.returncode == 0, started.stderr + log.stdout[-3000:]

    answer = json.loads(alice("python3", "-c", ASK, "generate").stdout)
    assert answer["text"].strip()
    assert answer["emulated"] is True
    assert answer["npu_busy_delta_us"] > 0
    health = json.loads(alice("python3", "-c", ASK).stdout)
    assert health["ok"] is True
    assert health["loaded"] is True

    restarts = alice("systemctl", "--user", "show", "npu-node-bounded", "--property=NRestarts", "--value").stdout
    assert restarts.strip() == "0"
    alice("systemctl", "--user", "stop", "npu-node-bounded")
    assert alice("systemctl", "--user", "is-failed", "npu-node-bounded", check=False).stdout.strip() == "inactive"
