"""One list of Intel's NPUs, the doctor's: roles, docs and energy registers agree with it, and the roles find by it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from worker_node.devices.blobs import _WITH_WEIGHTS
from worker_node.devices.energy import REGISTERS
from worker_node.doctor.checks import NPUS, known_drivers
from worker_node.tasks.generate.building import _ONE_CHUNK

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "ansible" / "roles"
RULES = ("known_bad.toml", "prompt_limits.toml")


def test_docs_have_a_row_for_every_npu_with_its_generation():
    page = (ROOT / "docs" / "npu-machine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*) \| 8086:(\w{4}) \| (\w{4}) \|", page, re.MULTILINE)
    assert {identity: (re.sub(r" \(.*", "", name), generation) for name, identity, generation in rows} == NPUS


@pytest.mark.parametrize("role", ["npu_driver", "npu_passthrough_host"])
def test_roles_look_for_every_npu(role):
    variables = yaml.safe_load((ROLES / role / "vars" / "main.yml").read_text(encoding="utf-8"))
    assert set(variables[f"{role}_pci_ids"]) == set(NPUS)


def test_no_other_page_or_script_has_a_list_of_its_own():
    places = [*ROOT.glob("docs/*.md"), *ROOT.glob("packaging/**/*"), *ROOT.glob("config/**/*"), *ROOT.glob("*.md")]
    places += [*ROLES.glob("*/README.md"), *ROLES.glob("*/tasks/*.yml")]
    listing = re.compile("|".join(f"\\b{identity}\\b" for identity in NPUS))
    holders = {path.name for path in places if path.is_file() and listing.search(path.read_text(errors="replace"))}
    assert holders <= {"npu-machine.md", "npu-facts.md", "CHANGELOG.md"}


def test_energy_registers_and_drivers_are_of_known_npus():
    names = {name for name, _ in NPUS.values()}
    assert {re.sub(r"-\w$", "", register.processor) for register in REGISTERS.values()} <= names
    assert {row["npu"] for row in known_drivers()["first"]} <= names


def test_rules_about_models_are_of_architectures_of_known_generations():
    tables = [tomllib.loads((ROOT / "worker_node" / "models" / name).read_text(encoding="utf-8")) for name in RULES]
    rows = [row for table in tables for rows in table.values() for row in rows]
    architectures = {row["architecture"] for row in rows if "architecture" in row} | _WITH_WEIGHTS | _ONE_CHUNK
    generations = {generation for _, generation in NPUS.values()}
    assert {f"{architecture[:2]}xx" for architecture in architectures} <= generations
    assert all(re.fullmatch(r"\d{4}", architecture) for architecture in architectures)


def searched(role, step, sysfs):
    """What the role's search prints on a machine."""
    tasks = yaml.safe_load((ROLES / role / "tasks" / "preflight.yml").read_text(encoding="utf-8"))
    (command,) = [task["ansible.builtin.shell"]["cmd"] for task in tasks if task["name"].startswith(step)]
    environment = {"SYSFS": str(sysfs), "IDS": " ".join(NPUS), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def machine(tmp_path):
    def add(address, identity, kind, vendor="8086"):
        device = tmp_path / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", identity), ("class", kind)):
            (device / name).write_text(f"0x{value}\n")
        return tmp_path

    add("0000:00:02.0", "64a0", "030000")
    add("0000:01:00.0", "1001", "120000", vendor="1da3")
    return add


@pytest.mark.linux
@pytest.mark.parametrize("identity", [*NPUS])
def test_roles_find_each_npu(machine, identity):
    sysfs = machine("0000:00:0b.0", identity, "120000")
    assert searched("npu_driver", "Look for", sysfs) == [f"0000:00:0b.0 {identity}"]
    assert searched("npu_passthrough_host", "Look for", sysfs)[0] == f"npu 0000:00:0b.0 {identity}"


@pytest.mark.linux
def test_roles_name_an_accelerator_that_they_do_not_know_and_prefer_an_npu_to_it(machine):
    sysfs = machine("0000:00:0b.0", "e0f1", "120000")
    assert searched("npu_driver", "Look for", sysfs) == ["0000:00:0b.0 e0f1 unknown"]
    assert searched("npu_passthrough_host", "Look for", sysfs) == ["unknown e0f1"]
    machine("0000:00:0c.0", "643e", "120000")
    assert searched("npu_driver", "Look for", sysfs)[0] == "0000:00:0c.0 643e"
    assert "npu 0000:00:0c.0 643e" in searched("npu_passthrough_host", "Look for", sysfs)


@pytest.mark.linux
@pytest.mark.parametrize("role", ["npu_driver", "npu_passthrough_host"])
def test_a_machine_without_an_npu_has_none(machine, role):
    assert searched(role, "Look for", machine("0000:00:1f.6", "550a", "020000")) == []
