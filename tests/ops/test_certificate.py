"""The certificate of a node says what is true at the time of the run. The node is scripted; no release is installed."""

import json
import shlex

import pytest

from tests.ops.conftest import KEY

pytestmark = [pytest.mark.timeout(7200)]

FACT = "/etc/ansible/facts.d/npu_node.fact"
PORT = 18081
NODE = {
    "npu_node_api_keys": [KEY],
    "npu_node_host": "127.0.0.1",
    "npu_node_port": PORT,
    "npu_node_npu_emulation": True,
}
# A node that answers what /srv/health holds: the status code, then the body. Without a key it names its status only.
SERVER = f"""
import http.server, json, pathlib

class Node(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code, body = pathlib.Path("/srv/health").read_text().split("\\n", 1)
        if self.headers.get("Authorization") != "Bearer {KEY}":
            body = json.dumps({{"status": json.loads(body)["status"]}})
        self.send_response(int(code))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

http.server.HTTPServer(("127.0.0.1", {PORT}), Node).serve_forever()
"""
SMOKE = {"verdict": "pass", "npu_busy_delta_us": 4711, "device_name": "NPU", "driver": None, "openvino_genai": "1"}
# Neither the login's runtime directory nor its working directory is the node's user's to use.
COMMAND = f"""#!/bin/sh
[ -z "$XDG_RUNTIME_DIR" ] && ls >/dev/null || exit 3
case $1 in
doctor) echo '{{"findings": []}}' ;;
smoke) echo '{json.dumps(SMOKE)}' ;;
esac
"""


@pytest.fixture(scope="module")
def scripted_node(hardware):
    """The machine with a release whose commands pass, and nothing that listens yet."""
    script = f"""
    set -eu
    getent passwd npu-node >/dev/null || useradd --system npu-node
    mkdir -p /opt/npu-node/releases/1.2.3-abc/bin
    ln -sfn /opt/npu-node/releases/1.2.3-abc /opt/npu-node/current
    printf %s {shlex.quote(COMMAND)} > /opt/npu-node/current/bin/npu-node
    chmod +x /opt/npu-node/current/bin/npu-node
    printf %s {shlex.quote(SERVER)} > /srv/node.py
    """
    hardware.run("sh", "-c", script)
    yield hardware
    hardware.run("systemctl", "stop", "scripted-node", check=False)
    hardware.run("rm", "-rf", "/opt/npu-node", FACT)


def serve(machine, code, status):
    body = {"status": status, "version": "1.2.3", "npu": {"emulated": True}, "models": [{"id": "m", "state": status}]}
    machine.run("sh", "-c", 'printf %s "$1" > /srv/health', "sh", f"{code}\n{json.dumps(body)}")
    if machine.run("systemctl", "is-active", "scripted-node", check=False).returncode:
        machine.run("systemd-run", "--unit=scripted-node", "--collect", "python3", "/srv/node.py")
        connect = f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {PORT}))'"
        machine.run("sh", "-c", f"until {connect} 2>/dev/null; do sleep 0.2; done")


def certificate(machine):
    return json.loads(machine.run("cat", FACT).stdout)


def test_the_certificate_follows_the_node(scripted_node, apply):
    serve(scripted_node, 200, "ready")
    certified = apply("npu_node", "--tags=verify", **NODE)
    assert certified.status == 0, certified.output[-5000:]
    first = certificate(scripted_node)
    assert first["certified"] is True
    assert first["release"] == "1.2.3-abc"
    assert first["models"] == ["m"]
    assert KEY not in certified.output

    again = apply("npu_node", "--tags=verify", **NODE)
    assert not any(again.changed.values()), again.changed_tasks()
    assert certificate(scripted_node) == first

    serve(scripted_node, 503, "failed")
    failed = apply("npu_node", "--tags=verify", **NODE)
    assert failed.status != 0
    assert "is not certified. /health says failed" in failed.text
    withdrawn = certificate(scripted_node)
    assert (withdrawn["certified"], withdrawn["health"]) == (False, "failed")

    serve(scripted_node, 200, "ready")
    assert apply("npu_node", "--tags=verify", **NODE).status == 0
    assert certificate(scripted_node)["certified"] is True

    scripted_node.run("systemctl", "stop", "scripted-node")
    silent = apply("npu_node", "--tags=verify", **NODE)
    assert silent.status != 0
    assert "/health says no answer" in silent.text
    assert certificate(scripted_node)["certified"] is False


@pytest.mark.parametrize(
    ("broken", "said"),
    [("doctor", "doctor refuses doctor did not run"), ("smoke", "smoke says no record")],
)
def test_a_check_that_crashes_withdraws_it(scripted_node, apply, broken, said):
    serve(scripted_node, 200, "ready")
    command = "/opt/npu-node/current/bin/npu-node"
    scripted_node.run("sed", "-i", f"s/^{broken}) .*/{broken}) echo crashed >\\&2; exit 1 ;;/", command)
    try:
        failed = apply("npu_node", "--tags=verify", **NODE)
    finally:
        scripted_node.run("sh", "-c", f"printf %s {shlex.quote(COMMAND)} > {command}")
    assert failed.status != 0
    assert said in failed.text
    assert certificate(scripted_node)["certified"] is False
