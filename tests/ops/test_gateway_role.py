"""npu_gateway on a bare machine: installed from the wheel, serving with a key, unchanged by a second run."""

import pytest
import testinfra

from tests.ops.containers import DEBIAN_13
from tests.ops.playbook import role_runner

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request("http://127.0.0.1:8090" + sys.argv[1], headers={"x-api-key": sys.argv[2]})
try:
    print(urllib.request.urlopen(request, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def gateway(machines, wheel, tmp_path_factory):
    machine = machines[DEBIAN_13.name]
    run_role = role_runner(tmp_path_factory.mktemp("gateway"), machine.variables())
    values = {
        "npu_gateway_wheel": str(wheel),
        "npu_gateway_pip_arguments": ["--no-index", "--find-links=/srv/wheelhouse"],
        "npu_gateway_nodes": ["http://127.0.0.1:8081"],
        "npu_gateway_node_key": "a-key-of-the-nodes",
        "npu_gateway_allowed_networks": ["10.0.0.0/8"],
        "npu_gateway_environment": {"NPU_CLIENT_CLOUD__API_KEY": "sk-cloud", "NPU_CLIENT_CLOUD__CHAT_MODEL": "gpt"},
    }
    first = run_role("npu_gateway", **values)
    assert first.status == 0, first.output[-6000:]
    second = run_role("npu_gateway", **values)
    yield machine, second
    machine.run("systemctl", "disable", "--now", "npu-gateway")


def test_a_second_run_changes_nothing(gateway):
    _, second = gateway
    assert second.status == 0
    assert not any(second.changed.values()), second.changed_tasks()


def test_it_serves_holders_of_a_key(gateway):
    machine, _ = gateway
    command = ("runuser", "-u", "npu-gateway", "--", "/opt/npu-gateway/current/bin/npu-gateway", "keys")
    key = machine.run(*command, "--keys", "/var/lib/npu-gateway/keys.db", "add", "ops").stdout.strip()

    def ask(path, key):
        return machine.run("python3", "-c", ASK, path, key).stdout.strip()

    assert ask("/v1/models", key) == "200"
    assert ask("/v1/models", "other") == "401"
    assert ask("/health", "") in {"200", "503"}


def test_its_files_and_its_unit_are_as_strict_as_they_should_be(gateway):
    machine, _ = gateway
    host = testinfra.get_host(f"podman://{machine.name}")
    for path, mode, user in (
        ("/etc/npu-gateway/gateway.env", 0o600, "root"),
        ("/var/lib/npu-gateway/keys.db", 0o600, "npu-gateway"),
        ("/var/lib/npu-gateway/keys.db.secret", 0o600, "npu-gateway"),
    ):
        assert (host.file(path).mode, host.file(path).user) == (mode, user)
    assert host.service("npu-gateway").is_enabled
    shown = host.check_output("systemctl show npu-gateway --property=User,NRestarts,MemoryDenyWriteExecute,ActiveState")
    assert set(shown.splitlines()) == {
        "User=npu-gateway",
        "NRestarts=0",
        "MemoryDenyWriteExecute=yes",
        "ActiveState=active",
    }
    score = machine.run("systemd-analyze", "security", "--no-pager", "npu-gateway.service", check=False).stdout
    assert float(score.rsplit("exposure level for npu-gateway.service: ", 1)[1].split()[0]) < 2.0
    assert "a-key-of-the-nodes" not in machine.run("journalctl", "--unit=npu-gateway", "--no-pager").stdout


def test_without_a_node_nothing_is_touched(gateway, wheel, tmp_path):
    machine, _ = gateway
    refused = role_runner(tmp_path, machine.variables())("npu_gateway", npu_gateway_wheel=str(wheel))
    assert refused.status != 0
    assert "would have no node: set npu_gateway_nodes" in refused.text
