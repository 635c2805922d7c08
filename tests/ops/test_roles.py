"""The roles as text: linted, their arguments described, the examples valid. No machine is needed."""

import json
import os
import re
import subprocess

import pytest
import yaml

from tests.ops.playbook import ANSIBLE, ROOT

# Ansible takes seconds to start, its linter half a minute: several times as long on a busy machine.
pytestmark = pytest.mark.timeout(1200)

ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
INVENTORIES = sorted(path.name for path in (ANSIBLE / "inventories").iterdir())
PROVISIONING = (ROOT / "docs" / "provisioning.md").read_text(encoding="utf-8")
VAULT = {"vault_npu_node_api_keys": ["k" * 20], "vault_guest_ssh_keys": ["ssh-ed25519 AAAA test"]}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def command(ansible, *arguments):
    environment = os.environ | {
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "PATH": f"{ansible}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        arguments, cwd=ANSIBLE, env=environment, capture_output=True, text=True, timeout=1000, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def test_lint_finds_nothing_in_its_production_profile(ansible):
    command(ansible, "ansible-lint", "--nocolor", "--profile=production")


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_the_example_inventories_fit_the_playbook(ansible, inventory):
    command(ansible, "ansible-playbook", "-i", f"inventories/{inventory}", "site.yml", "--syntax-check")
    hosts = json.loads(
        command(ansible, "ansible-inventory", "-i", f"inventories/{inventory}", "--list", "-e", json.dumps(VAULT))
    )
    assert hosts["npu_nodes"]["hosts"]


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_described_and_every_argument_has_a_default(role):
    directory = ANSIBLE / "roles" / role
    options = read(directory / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = read(directory / "defaults" / "main.yml")
    required = {name for name, option in options.items() if option.get("required")}
    assert set(options) - required == set(defaults)
    for name, option in options.items():
        assert option["description"], name
        if "default" in option:
            assert option["default"] == defaults[name], name


@pytest.mark.parametrize("tags", re.findall(r"--tags[ =](\S+)", PROVISIONING))
def test_the_tags_of_the_manual_run_what_they_need(ansible, tags):
    listed = command(
        *(ansible, "ansible-playbook", "-i", "inventories/bare-metal", "site.yml", "--list-tasks", f"--tags={tags}")
    )
    role = "npu_gateway" if tags == "gateway" else "npu_node"
    assert listed.count(f"{role} : ") > 5
    for needed in ("Look for the release", "Name the release"):
        assert needed in listed or tags == "verify"


def test_collections_are_pinned_to_those_of_the_package(ansible):
    wanted = {entry["name"]: entry["version"] for entry in read(ANSIBLE / "requirements.yml")["collections"]}
    listed = json.loads(command(ansible, "ansible-galaxy", "collection", "list", "--format=json"))
    shipped = {name: found["version"] for collections in listed.values() for name, found in collections.items()}
    assert {name: shipped.get(name) for name in wanted} == wanted
