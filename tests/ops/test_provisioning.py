"""A fleet from bare machines: what the playbook did, and what an auditor who knows nothing of it finds there."""

import json
import socket
import ssl
import urllib.parse

import numpy as np
import pytest
import testinfra

from tests.ops.calls import call, eventually, wait_until_ready
from tests.ops.conftest import EMBEDDER, KEY, RUNBOOKS, TRUSTED
from tests.ops.containers import DEBIAN_12, DEBIAN_13
from worker_node.models.passports import PassportStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]
NODES = [DEBIAN_12.name, DEBIAN_13.name]


@pytest.fixture(params=NODES)
def machine(request, fleet):
    return fleet.machines[request.param]


@pytest.fixture
def host(machine):
    return testinfra.get_host(f"podman://{machine.name}")


def properties(host, *names):
    shown = host.check_output("systemctl show npu-node.service --property=" + ",".join(names))
    return dict(line.split("=", 1) for line in shown.splitlines())


def test_it_is_checked_before_the_first_run_converges_and_changes_nothing_again(fleet):
    for outcome in (fleet.checked, fleet.converged, fleet.repeated):
        assert outcome.status == 0, outcome.output[-6000:]
        assert set(outcome.changed) == {machine.name for machine in fleet.machines.values()}
    assert all(fleet.converged.changed.values())
    assert not any(fleet.repeated.changed.values()), fleet.repeated.changed_tasks()


def test_its_processes_have_no_rights(host):
    service = properties(host, "MainPID", "NRestarts")
    assert service["NRestarts"] == "0"
    pid = service["MainPID"]
    status = dict(line.split(":", 1) for line in host.check_output(f"cat /proc/{pid}/status").splitlines())
    assert int(status["Uid"].split()[0]) == host.user("npu-node").uid
    assert {int(status[name].strip(), 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"


def test_the_key_is_nowhere_but_where_it_belongs(host):
    readers = {"/etc/npu-node/api_keys": "600 root root", "/etc/prometheus/npu-node.key": "640 root prometheus"}
    for path, mode in readers.items():
        assert host.check_output(f"stat --format='%a %U %G' {path}") == mode
    assert host.check_output("stat --format='%a %U' /etc/npu-node/tls/key.pem") == "640 root"
    found = host.run(f"grep -rlF {KEY} /etc /opt /var/lib/npu-node /var/log").stdout.split()
    assert sorted(found) == sorted(readers)
    assert KEY not in host.check_output("journalctl --unit=npu-node --no-pager")


def test_releases_and_models_came_as_asked(fleet):
    by_index, by_pull = fleet.machines.values()
    assert not by_index.run("ls", "/opt/npu-node/wheels").stdout.count(".whl")
    (pulled,) = [task for task in fleet.converged.changed_tasks() if "Pull and convert" in task]
    assert by_pull.name in pulled
    assert EMBEDDER in pulled


def test_root_has_the_command_with_the_service_s_models(host):
    assert EMBEDDER in host.check_output("npu-node list")


def test_an_embedding_is_right_and_from_the_npu_s_path(machine):
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Quarterly revenue rose."]
    _, reply = call(f"http://{machine.address}:8081/embeddings", KEY, {"texts": texts})
    vectors = np.asarray(reply["embeddings"], np.float32)
    assert vectors.shape == (3, 384)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert reply["device"] == "NPU"
    assert reply["emulated"] is True


def test_the_proxy_ends_tls(machine, certificates):
    name = machine.distribution.name
    context = ssl.create_default_context(cafile=str(certificates / f"{name}.pem"))
    request = f"GET /health HTTP/1.1\r\nHost: {name}:8443\r\nConnection: close\r\n\r\n"
    with (
        socket.create_connection((machine.address, 8443), timeout=300) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        secured.sendall(request.encode())
        answer = b"".join(iter(lambda: secured.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"status":"ready"' in answer


def test_the_firewall_lets_in_only_whom_it_should(fleet, machine):
    """A neighbour asks from an address that is not among the sources, and the way back to it is known."""
    stranger = "198.51.100.7"
    neighbour = next(other for other in fleet.machines.values() if other is not machine)
    probe = (
        f"import socket, sys; s = socket.socket(); s.settimeout(float(sys.argv[2])); s.bind(('{stranger}', 0));"
        f"sys.exit(s.connect_ex(('{machine.address}', int(sys.argv[1]))) != 0)"
    )

    def reached(port, within=30):
        return neighbour.run("python3", "-c", probe, port, str(within), check=False).returncode == 0

    neighbour.run("ip", "address", "replace", f"{stranger}/32", "dev", "eth0")
    machine.run("ip", "route", "replace", stranger, "via", neighbour.address)
    try:
        assert not reached("8081", within=2)
        assert not reached("8443", within=2)
        assert not reached("9100", within=2)
        # What a reload of the machine's own rules does to all others.
        machine.run("nft", "delete", "table", "inet", "npu_node")
        assert reached("8081")
        assert reached("9100")
    finally:
        machine.run("systemctl", "reload", "npu-node-firewall.service")
        machine.run("ip", "route", "delete", stranger)
        neighbour.run("ip", "address", "delete", f"{stranger}/32", "dev", "eth0")


def test_it_is_certified_and_the_fact_says_so(host, machine):
    fact = json.loads(host.file("/etc/ansible/facts.d/npu_node.fact").content_string)
    assert (fact["passed"], fact["problems"]) == (True, [])
    assert (fact["health"], fact["emulated"]) == ("ready", True)
    assert fact["openvino"]
    assert fact["doctor"]["refused"] == []
    assert fact["release"] == host.file("/opt/npu-node/current").linked_to.rsplit("/", 1)[-1]
    found = {row["model"]: (row["device"], row["emulated"], row["verdict"], row["state"]) for row in fact["passports"]}
    health = wait_until_ready(f"http://{machine.address}:8081", KEY)
    on_npu = {model["id"] for model in health["models"] if "NPU" in model["placements"]}
    assert found == dict.fromkeys(on_npu, ("NPU", True, "certified", "certified"))
    shown = {engine["certified"] for model in health["models"] if model["id"] in on_npu for engine in model["engines"]}
    assert shown == {"certified"}


def test_passports_are_fetched_and_the_key_that_signs_them_is_not(fleet, host, machine, tmp_path):
    passports = "/var/lib/npu-node/passports"
    listed = (
        "HOME=/nonexistent NPU_NODE_MODEL_STORE=/var/lib/npu-node/models /opt/npu-node/current/bin/npu-node passports"
    )
    keys = host.check_output(f"{listed} --config /etc/npu-node/node.toml keys").split()
    assert TRUSTED in keys
    fetched = fleet.passports / machine.name
    reports = sorted(path.name for path in fetched.iterdir())
    files = sorted(file.rsplit("/", 1)[-1] for file in host.check_output(f"ls {passports}/*.json").split())
    assert files
    stems = [file.removesuffix(".json") for file in files]
    assert reports == sorted(f"{stem}.{kind}" for stem in stems for kind in ("html", "passport.json"))
    for stem in stems:
        # Another node that trusts this one's key takes it.
        content = (fetched / f"{stem}.passport.json").read_bytes()
        assert PassportStore(tmp_path, keys).add(content).verdict == "certified"

    key = host.file(f"{passports}/private.key")
    assert (oct(key.mode), key.user) == (oct(0o600), "npu-node")
    secret = key.content_string.splitlines()[1]
    found = host.run(f"grep -rlF {secret} /etc /opt /var/lib/npu-node /var/log /root /tmp").stdout.split()
    assert found == [f"{passports}/private.key"]
    assert not [path for path in fleet.passports.rglob("*") if path.is_file() and secret in path.read_text()]
    assert secret not in fleet.converged.output


def test_prometheus_scrapes_both_nodes_and_watches_its_rules(host):
    def ask(path):
        fetch = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9090{path}').read().decode())"
        return json.loads(host.check_output(f'python3 -c "{fetch}"'))["data"]

    # One scrape that was too slow is one target that is down until the next.
    targets = eventually(
        lambda: ask("/api/v1/targets?state=active")["activeTargets"],
        lambda targets: {target["health"] for target in targets} == {"up"},
    )
    assert {target["labels"]["job"] for target in targets} == {"npu-node", "machine", "prometheus"}
    assert {t["labels"]["instance"] for t in targets if t["labels"]["job"] == "npu-node"} == set(NODES)
    rules = eventually(
        lambda: {rule["name"]: rule for group in ask("/api/v1/rules")["groups"] for rule in group["rules"]},
        lambda rules: rules["NPUWatchdog"]["state"] == "firing",
    )
    assert rules["NPUNodeDown"]["annotations"]["runbook_url"] == f"{RUNBOOKS}#npunodedown"
    # The first machine reports when the certificate of its proxy ends: it is made for seven days.
    # (By its own job: until it was configured, Prometheus scraped itself as its package has it.)
    asked = urllib.parse.quote('npu_tls_certificate_expiry_timestamp_seconds{job="machine"} - time()')
    [end] = eventually(lambda: ask(f"/api/v1/query?query={asked}")["result"], bool)
    assert end["metric"]["path"] == "/etc/npu-node/tls/chain.pem"
    assert 6 * 86400 < float(end["value"][1]) <= 7 * 86400


def test_a_hung_node_is_killed_and_comes_back(host):
    before = properties(host, "MainPID")["MainPID"]
    host.check_output(f"kill -STOP {before}")
    wait = (
        "for i in $(seq 1200); do "
        f'[ "$(systemctl show npu-node --property=MainPID --value)" != {before} ] && '
        "systemctl is-active --quiet npu-node && exit 0; sleep 1; done; exit 1"
    )
    # It takes the 30 s of WatchdogSec, and a busy machine more.
    assert host.run(f"sh -c '{wait}'").rc == 0
    assert "Watchdog timeout" in host.check_output("journalctl --unit=npu-node --no-pager")
