"""A gateway on a bare machine in front of a real node: what the playbook did, what callers get, keys that change."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend_client.gateway.keys import KeyStore
from tests.ops.calls import call
from tests.ops.conftest import EMBEDDER, KEY, RUNBOOKS
from tests.ops.containers import DEBIAN_13, Machine, booted, run
from tests.ops.playbook import Outcome, failed, play, succeeded, unchanged, write_inventory
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

NAME = "gateway"
CLOUD_KEY = 'cloud-"key"-with-\\-and-$HOME'
PORT = 8090


@dataclass(frozen=True, slots=True)
class Gateway:
    machine: Machine
    node: str
    inventory: Path
    keys: Path
    key: str
    checked: Outcome
    converged: Outcome
    repeated: Outcome


def make_key(path):
    with contextlib.closing(KeyStore(path)) as store:
        return store.add("team-a", [EMBEDDER])


@pytest.fixture(scope="module")
def gateway(machines_possible, wheelhouse, wheel, store, tmp_path_factory):
    """The machine, checked, provisioned and provisioned again; its node runs here, on the address that it sees."""
    directory = tmp_path_factory.mktemp("gateway")
    keys = directory / "gateway.db"
    key = make_key(keys)
    mounts = (f"{wheelhouse(DEBIAN_13.python)}:/srv/wheelhouse:ro",)
    with booted(DEBIAN_13, *mounts, name="npu-ops-gateway") as machine:
        here = run("podman", "inspect", "--format={{.NetworkSettings.Gateway}}", machine.name).stdout.strip()
        models = json.dumps([{"name": EMBEDDER, "placements": ["CPU"]}])
        with start_node("--host", here, NPU_NODE_API_KEYS=KEY, NPU_NODE_MODELS=models) as node:
            variables = {
                "npu_gateway_nodes": [node.url],
                "npu_gateway_node_key": KEY,
                "npu_gateway_wheel": str(wheel),
                "npu_gateway_pip_arguments": ["--no-index", "--find-links=/srv/wheelhouse"],
                "npu_gateway_host": "0.0.0.0",  # noqa: S104  (the machine's own network)
                "npu_gateway_keys_file": str(keys),
                "npu_gateway_ready_timeout_s": 30,
                "npu_gateway_environment": {
                    "NPU_CLIENT_SPACES": {},
                    "NPU_CLIENT_CLOUD__API_KEY": CLOUD_KEY,
                    "NPU_CLIENT_CLOUD__BASE_URL": "http://127.0.0.1:9",
                },
            }
            inventory = write_inventory(directory / "hosts.json", {"gateways": {NAME: machine.variables() | variables}})
            checked, converged, repeated = play(inventory, "--check"), play(inventory), play(inventory)
            yield Gateway(machine, node.url, inventory, keys, key, checked, converged, repeated)


def embed(machine, key):
    url = f"http://{machine.address}:{PORT}/v1/embeddings"
    return call(url, key, {"model": EMBEDDER, "input": "hello"})


def test_it_is_checked_before_the_first_run_converges_and_changes_nothing_again(gateway):
    for outcome in (gateway.checked, gateway.converged, gateway.repeated):
        assert outcome.status == 0, outcome.output[-6000:]
    assert gateway.converged.changed[NAME]
    assert not gateway.repeated.changed[NAME], gateway.repeated.changed_tasks()
    assert CLOUD_KEY not in gateway.converged.output
    assert KEY not in gateway.converged.output


def test_callers_with_a_key_get_answers_of_the_node_and_others_none(gateway):
    status, answer = embed(gateway.machine, gateway.key)
    assert status == 200, answer
    assert len(answer["data"][0]["embedding"]) == 384
    assert embed(gateway.machine, None)[0] == 401
    assert embed(gateway.machine, KEY)[0] == 401, "the nodes' key is not one of the gateway"
    health = call(f"http://{gateway.machine.address}:{PORT}/health")[1]
    assert (health["nodes_usable"], health["status"]) == (1, "ready")


def test_the_service_has_no_rights(gateway):
    shown = gateway.machine.run("systemctl", "show", "npu-gateway", "--property=User,NRestarts,MainPID").stdout
    found = dict(line.split("=", 1) for line in shown.splitlines())
    pid = found.pop("MainPID")
    assert found == {"User": "npu-gateway", "NRestarts": "0"}
    status = dict(line.split(":", 1) for line in gateway.machine.run("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert {int(status[name].strip(), 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["Seccomp"].strip() == "2"
    # What a setting with quotes, a backslash and a dollar comes to.
    environment = gateway.machine.run("cat", f"/proc/{pid}/environ").stdout.split("\0")
    assert f"NPU_CLIENT_CLOUD__API_KEY={CLOUD_KEY}" in environment


def test_files_with_secrets_are_for_their_owner_alone(gateway):
    paths = (
        "/etc/npu-gateway/gateway.env",
        "/var/lib/npu-gateway/gateway.db",
        "/var/lib/npu-gateway/gateway.db.secret",
    )
    listed = gateway.machine.run("stat", "--format=%a %U %n", *paths).stdout.splitlines()
    assert listed == [f"600 {owner} {path}" for owner, path in zip(("root", *["npu-gateway"] * 2), paths, strict=True)]
    found = gateway.machine.run("grep", "-rlF", KEY, "/etc", "/opt", "/var/lib/npu-gateway", "/var/log", check=False)
    assert found.stdout.split() == ["/etc/npu-gateway/gateway.env"]


def test_keys_that_changed_on_the_controller_replace_those_of_the_machine(gateway):
    with contextlib.closing(KeyStore(gateway.keys)) as store:
        [old] = store.entries
        new = store.rotate(old.prefix)
    succeeded(play(gateway.inventory, "--tags=configure"))
    assert embed(gateway.machine, gateway.key)[0] == 401
    assert embed(gateway.machine, new)[0] == 200
    unchanged(play(gateway.inventory, "--tags=configure"))


def test_a_gateway_that_finds_no_node_fails_the_run_and_says_so(gateway):
    wrong = {
        "npu_gateway_nodes": ["http://127.0.0.1:1"],
        "npu_gateway_environment": {},
        "npu_gateway_ready_timeout_s": 4,
    }
    try:
        failed(
            play(gateway.inventory, "--tags=configure", **wrong), f"The gateway on {NAME} does not serve", "unavailable"
        )
    finally:
        # The settings are again those of the last run that succeeded, and the process is not.
        succeeded(play(gateway.inventory, "--tags=configure"))


def test_prometheus_scrapes_the_gateway_with_a_key_of_its_own(gateway, tmp_path):
    with contextlib.closing(KeyStore(gateway.keys)) as store:
        key = store.add("prometheus")
    succeeded(play(gateway.inventory, "--tags=configure"))
    variables = {
        "npu_monitoring_nodes": [{"name": "node", "address": gateway.node.removeprefix("http://")}],
        "npu_monitoring_api_key": KEY,
        "npu_monitoring_gateways": [f"127.0.0.1:{PORT}"],
        "npu_monitoring_gateway_key": key,
        "npu_monitoring_scrape_interval": "5s",
        "npu_monitoring_runbook_url": RUNBOOKS,
        "npu_monitoring_grafana_package": "",
        "npu_monitoring_exporter": False,
    }
    inventory = write_inventory(
        tmp_path / "hosts.json", {"monitoring": {NAME: gateway.machine.variables() | variables}}
    )
    refused = play(inventory, npu_monitoring_gateway_key="")
    assert "npu_monitoring_gateway_key" in refused.text
    assert not refused.changed[NAME]
    # The run itself fails while a target is down.
    succeeded(play(inventory))
    ask = (
        "import urllib.request; print(urllib.request.urlopen("
        "'http://127.0.0.1:9090/api/v1/query?query=npu_gateway_node_usable').read().decode())"
    )
    [sample] = json.loads(gateway.machine.run("python3", "-c", ask).stdout)["data"]["result"]
    assert (sample["metric"]["job"], sample["metric"]["node"], sample["value"][1]) == ("npu-gateway", gateway.node, "1")
    assert key not in gateway.machine.run("cat", "/etc/prometheus/prometheus.yml").stdout


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"npu_gateway_nodes": []}, "Name at least one node"),
        ({"npu_gateway_environment": {"NPU_NODE_HOST": "x"}}, "settings NPU_CLIENT_* and NPU_GATEWAY_* only"),
        ({"npu_gateway_keys_file": "/nowhere/gateway.db"}, "with its .secret beside it"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_changed(gateway, given, problem):
    outcome = failed(play(gateway.inventory, **given))
    assert not outcome.changed[NAME]
    assert problem in outcome.text or "no_log" in outcome.text
