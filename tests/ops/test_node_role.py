"""Certification by the role, and the fact that it leaves. The node is scripted; no release is installed."""

import contextlib
import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ops import playbook
from tests.ops.conftest import KEY
from tests.ops.containers import Machine
from tests.ops.playbook import ROOT, Outcome, role_runner

pytestmark = [pytest.mark.timeout(7200)]

FACT = "/etc/ansible/facts.d/npu_node.fact"
PASSPORTS = "/var/lib/npu-node/passports"
PRIVATE_KEY = f"{PASSPORTS}/private.key"
PORT = 18081
CONSTRAINTS = "pinned==1\n"
# A node whose files in /srv/node say what it does. `npu_only`: it has no second placement; `verdict`: what fails.
# Its release is its OpenVINO, too: a passport of another one is expired.
NODE = """#!/usr/bin/python3
import http.server, json, os, pathlib, pwd, socket, sys, threading, time

STATE, PASSPORTS = pathlib.Path("/srv/node"), pathlib.Path("PASSPORTS_DIRECTORY")
RELEASE = pathlib.Path(__file__).resolve().parts[4]
PASSPORT = PASSPORTS / "m.NPU-emulated.json"


def said(name):
    return (STATE / name).read_text() if (STATE / name).exists() else ""


def passport():
    row = {"configured": "m", "model": "m", "device": "NPU", "emulated": True, "verdict": None, "made": None,
           "failed": [], "max_prompt_tokens": None, "state": "not certified",
           "reason": "npu-node certify has not been run for it"}
    if not PASSPORT.exists():
        return row
    kept = json.loads(PASSPORT.read_text())
    row |= {key: kept[key] for key in ("verdict", "made", "failed")}
    if kept["release"] != RELEASE:
        return row | {"state": "expired", "reason": "the openvino changed since " + kept["made"]}
    words = "failed at " + kept["made"] + ": " + ", ".join(kept["failed"]) if kept["failed"] else "at " + kept["made"]
    return row | {"state": kept["verdict"], "reason": words}


def health():
    if said("health"):
        code, status = said("health").split()
        return int(code), status
    return (503, "failed") if passport()["state"] == "failed" and said("npu_only") else (200, "ready")


class Node(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code, status = health()
        body = {"status": status, "version": RELEASE.split("-")[0]}
        if self.headers.get("Authorization") == "Bearer NODE_KEY":
            model = {"id": "m", "state": status, "engines": [{"state": "ready", "canary": {"openvino": RELEASE}}]}
            device = {"name": "NPU", "full_name": "NPU, emulated", "driver": None}
            body |= {"reason": None, "npu": {"emulated": True}, "models": [model], "devices": [device]}
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(text, os.environ["NOTIFY_SOCKET"])


def serve():
    server = http.server.HTTPServer(("127.0.0.1", NODE_PORT), Node)
    threading.Thread(target=server.serve_forever).start()
    notify(b"READY=1")
    while True:
        notify(b"WATCHDOG=1")
        time.sleep(5)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)


def certify(words):
    with socket.socket() as listening:
        served = not listening.connect_ex(("127.0.0.1", NODE_PORT))
    call = {"words": words, "user": pwd.getpwuid(os.getuid()).pw_name, "served": served,
            "variable": os.environ.get("VARIABLE"), "store": os.environ.get("NPU_NODE_MODEL_STORE")}
    write(pathlib.Path("/var/lib/npu-node/called.json"), json.dumps(call))
    if said("verdict") == "crash":
        sys.exit("npu-node: the device is gone")
    if not (PASSPORTS / "private.key").exists():
        write(PASSPORTS / "private.key", "THE PRIVATE " + "KEY")
    failed = said("verdict").split(",") if said("verdict") else []
    kept = {"verdict": "failed" if failed else "certified", "made": "2026-01-01T00:00:00+00:00", "failed": failed,
            "release": RELEASE}
    write(PASSPORT, json.dumps(kept))
    out = pathlib.Path(words[[word.partition("=")[0] for word in words].index("--out")].partition("=")[2])
    write(out / "m.NPU-emulated.passport.json", json.dumps(kept))
    write(out / "m.NPU-emulated.html", "<p>" + kept["verdict"])
    sys.exit(1 if failed else 0)


command, words = sys.argv[1], sys.argv[2:]
# Neither the login's runtime directory nor its working directory is the node's user's to use.
assert command == "serve" or not os.environ.get("XDG_RUNTIME_DIR"), os.environ
os.listdir()
if command == "serve":
    serve()
elif command == "certify":
    certify(words)
elif command == "doctor":
    sys.exit(said("doctor")) if said("doctor") else print('{"findings": []}')
else:
    assert (command, words[-2:]) == ("passports", ["list", "--json"]), sys.argv
    print(json.dumps([passport()]))
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A run of the role, and what was found after it: the fact, how `certify` was called, what serves, the files."""

    outcome: Outcome
    fact: dict
    called: dict | None
    serving: tuple[str, str]
    passport: str
    fetched: dict[str, str]


@dataclass(frozen=True, slots=True)
class ScriptedNode:
    machine: Machine
    directory: Path

    def play(self, *arguments, release="1.2.3", **variables):
        defaults = {
            "npu_node_api_keys": [KEY],
            "npu_node_checkout": str(ROOT),
            "npu_node_constraints": str(self.directory / "constraints.txt"),
            "npu_node_index_requirement": f"npu-node=={release}",
            "npu_node_host": "127.0.0.1",
            "npu_node_port": PORT,
            "npu_node_npu_emulation": True,
            "npu_node_models": [{"name": "m"}],
            "npu_node_settings": {"require_certified": True, "trusted_keys": ["ab" * 32]},
            "npu_node_firewall": False,
            "npu_node_ready_timeout_s": 10,
            "npu_node_environment": {"VARIABLE": 'a "value"'},
            "npu_node_passport_directory": str(self.directory / "passports"),
        }
        run_role = role_runner(self.directory, self.machine.variables())
        outcome = run_role("npu_node", *(arguments or ("--tags=configure",)), **defaults | variables)
        called = "f=/var/lib/npu-node/called.json; [ ! -e $f ] || { cat $f; rm $f; }"
        pid = self.machine.run("systemctl", "show", "npu-node", "--property=MainPID", "--value").stdout.strip()
        link = self.machine.run("readlink", "/opt/npu-node/current").stdout.strip()
        fetched = [path for path in (self.directory / "passports").rglob("*") if path.is_file()]
        return Step(
            outcome,
            json.loads(self.machine.run("cat", FACT).stdout),
            json.loads(self.machine.run("sh", "-c", called).stdout or "null"),
            (pid, link.rsplit("/", 1)[-1].split("-")[0]),
            self.machine.run("cat", f"{PASSPORTS}/m.NPU-emulated.json", check=False).stdout,
            {str(path.relative_to(self.directory / "passports")): path.read_text() for path in fetched},
        )

    def say(self, **files):
        """What the node does from now on: the content of its files; None: as a node that is well."""
        script = '[ -z "$2" ] && rm -f "$1" || printf %s "$2" > "$1"'
        for name, text in files.items():
            self.machine.run("sh", "-c", script, "sh", f"/srv/node/{name}", text or "")


def release_name(version):
    made_of = f"npu-node=={version}{CONSTRAINTS.rstrip()}convert,node/usr/bin/python3"
    return f"{version}-{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"


@contextlib.contextmanager
def scripted(machine, directory):
    """The machine with two releases of the scripted node, and no trace of an earlier run."""
    traces = f"/opt/npu-node /etc/npu-node /srv/node /var/lib/npu-node {FACT}"
    program = NODE.replace("PASSPORTS_DIRECTORY", PASSPORTS).replace("NODE_KEY", KEY).replace("NODE_PORT", str(PORT))
    script = f"""
    set -eu
    systemctl stop npu-node 2>/dev/null || true
    rm -rf {traces}
    getent group render >/dev/null || groupadd --system render
    getent passwd npu-node >/dev/null || useradd --system npu-node
    mkdir -p /opt/npu-node/good /etc/npu-node /srv/node /var/lib/npu-node
    chown npu-node: /var/lib/npu-node
    for release in {release_name("1.2.3")} {release_name("1.2.4")}; do
      mkdir -p /opt/npu-node/releases/$release/bin
      cd /opt/npu-node/releases/$release
      printf '#!/bin/sh\\n' > bin/python
      printf %s {shlex.quote(program)} > bin/npu-node
      chmod +x bin/*
      touch .complete
    done
    """
    machine.run("sh", "-c", script)
    (directory / "constraints.txt").write_text(CONSTRAINTS)
    try:
        yield ScriptedNode(machine, directory)
    finally:
        machine.run("systemctl", "stop", "npu-node", check=False)
        machine.run("rm", "-rf", *traces.split())


@pytest.fixture(scope="module")
def steps(hardware, tmp_path_factory):
    """Runs of the role on one machine, in turn, by name. Each release has another OpenVINO than the one before."""
    with scripted(hardware, tmp_path_factory.mktemp("node")) as node:
        steps = {}
        node.say(verdict="crash")
        steps["breaks off"] = node.play()
        node.say(verdict=None)
        steps["certified"] = node.play()
        steps["repeated"] = node.play()
        node.say(verdict="canary,busy counter")
        steps["fails"] = node.play(release="1.2.4", npu_node_certify="full")
        hardware.run("chmod", "644", PRIVATE_KEY)
        steps["fails still"] = node.play(release="1.2.4")
        hardware.run("chmod", "600", PRIVATE_KEY)
        node.say(verdict=None)
        steps["again"] = node.play(release="1.2.4", npu_node_certify_again=True)
        node.say(npu_only="yes", verdict="agreement with the CPU")
        steps["goes back"] = node.play()
        yield steps


def succeeded(step):
    playbook.succeeded(step.outcome)
    assert (step.fact["passed"], step.fact["problems"]) == (True, [])
    return step


def failed(step, *said):
    playbook.failed(step.outcome, *said)
    return step


def test_a_certification_that_breaks_off_leaves_a_node_that_serves(steps):
    step = failed(
        steps["breaks off"],
        "m: not certified: npu-node certify has not been run for it",
        "npu-node certify ended early: ",
        "npu-node: the device is gone",
        "To certify it: run the playbook with --tags configure.",
    )
    assert step.called["served"] is False
    assert (step.fact["passed"], step.fact["health"]) == (False, "ready")


def test_what_has_no_passport_is_certified_with_the_node_stopped_and_as_the_node(steps):
    step = succeeded(steps["certified"])
    assert step.called == {
        "words": [
            "m",
            "--device=NPU",
            "--config=/etc/npu-node/node.toml",
            "--out=/var/lib/npu-node/certified",
            "--quick",
        ],
        "user": "npu-node",
        "served": False,
        "variable": 'a "value"',
        "store": "/var/lib/npu-node/models",
    }
    assert (step.fact["health"], step.fact["models"], step.fact["emulated"]) == ("ready", ["m"], True)
    assert (step.fact["release"], step.fact["openvino"]) == (release_name("1.2.3"), release_name("1.2.3"))
    [passport] = step.fact["passports"]
    assert (passport["model"], passport["device"], passport["emulated"]) == ("m", "NPU", True)
    assert (passport["state"], passport["verdict"]) == ("certified", "certified")
    assert passport["made"] == "2026-01-01T00:00:00+00:00"
    assert sorted(step.fetched) == ["machine/m.NPU-emulated.html", "machine/m.NPU-emulated.passport.json"]


@pytest.mark.usefixtures("steps")
def test_systemd_starts_the_node_when_a_certification_ends_with_or_without_the_controller(hardware):
    log = hardware.run("journalctl", "--unit=npu-node-certify", "--output=cat", "--no-pager").stdout
    assert "Triggering OnSuccess= dependencies" in log
    assert "Triggering OnFailure= dependencies" in log


def test_a_second_run_changes_nothing_and_does_not_stop_the_node(steps):
    first, again = steps["certified"], succeeded(steps["repeated"])
    assert not any(again.outcome.changed.values()), again.outcome.changed_tasks()
    assert (again.called, again.serving, again.fact) == (None, first.serving, first.fact)


def test_a_failure_fails_the_run_by_name_and_the_node_serves_by_its_next_placement(steps):
    step = failed(
        steps["fails"],
        "m on the NPU failed at 2026-01-01T00:00:00+00:00: canary, busy counter",
        "/passports/machine on the controller",
        "npu_node_certify_again=true",
    )
    assert "--quick" not in step.called["words"]
    assert (step.fact["passed"], step.fact["health"], step.serving[1]) == (False, "ready", "1.2.4")
    assert step.fact["passports"][0]["failed"] == ["canary", "busy counter"]
    assert "failed" in step.fetched["machine/m.NPU-emulated.html"]


def test_what_failed_is_left_alone_until_it_is_to_be_certified_again(steps):
    step = failed(steps["fails still"], "m on the NPU failed")
    assert (step.called, step.serving) == (None, steps["fails"].serving)
    assert succeeded(steps["again"]).called is not None


def test_a_release_whose_only_placement_fails_goes_back_with_the_passports_of_the_one_before(steps):
    step = failed(steps["goes back"], "was rolled back", "The reports are in")
    assert step.called["words"]
    assert step.serving[1] == "1.2.4"
    assert step.passport == steps["again"].passport
    assert (step.fact["passed"], step.fact["passports"][0]["state"]) == (True, "certified")
    assert "failed" in step.fetched["machine/m.NPU-emulated.html"], "what was found stays"


@pytest.mark.usefixtures("steps")
def test_the_group_of_the_node_and_nobody_else_may_read_energy_counters(hardware):
    rules = "/etc/udev/rules.d/70-npu-node.rules"
    hardware.run("udevadm", "verify", rules)
    # No machine of the tests has such a counter: the commands of the rules run on files.
    script = """
    set -eu
    mkdir -p /srv/counter && cd /srv/counter
    install --mode=400 /dev/null telem && install --mode=400 /dev/null energy_uj
    grep -o "sh -c '[^']*'" "$1" | sed "s|%S%p|$PWD|g" | sh -eu
    stat --format="%n %a %G" *
    """
    found = hardware.run("sh", "-c", script, "sh", rules).stdout
    assert found.splitlines() == ["energy_uj 440 render", "telem 440 render"]


def test_the_private_key_stays_beside_the_passports_for_the_node_alone(steps, hardware):
    found = hardware.run("grep", "-rl", "THE PRIVATE KEY", "/opt/npu-node", "/etc", "/var/lib/npu-node").stdout
    assert found.split() == [PRIVATE_KEY]
    assert hardware.run("stat", "--format=%a %U", PRIVATE_KEY).stdout.split() == ["600", "npu-node"]
    for step in steps.values():
        assert "THE PRIVATE KEY" not in step.outcome.output + "".join(step.fetched.values())
    failed(steps["fails still"], f"{PRIVATE_KEY} must belong to npu-node with mode 0600, and has mode 0644")


def test_the_fact_follows_a_node_that_is_not_certified(hardware, tmp_path):
    with scripted(hardware, tmp_path) as node:
        first = succeeded(node.play(npu_node_certify="none"))
        assert first.called is None
        assert first.fact["passports"][0]["state"] == "not certified"
        for said, told in (
            ({"health": "503 failed"}, "/health says failed"),
            ({"doctor": "crashed"}, "doctor refuses doctor did not run"),
        ):
            node.say(**said)
            step = failed(node.play("--tags=verify", npu_node_certify="none"), told)
            assert step.fact["passed"] is False
            node.say(**dict.fromkeys(said))
        hardware.run("systemctl", "stop", "npu-node")
        silent = failed(node.play("--tags=verify", npu_node_certify="none"), "/health says no answer")
        assert silent.fact["passed"] is False
        assert KEY not in silent.outcome.output
