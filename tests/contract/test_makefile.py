"""What the targets of the Makefile install: shown by `make --dry-run`, nothing is run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="NOT RUN: make is not installed")


def steps(target, environment):
    """The commands that make would run for a target, with `environment` as its .venv."""
    done = subprocess.run(
        ["make", "--dry-run", target, f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["demo", "serve"])
def test_what_runs_a_node_installs_no_development_tools_and_states_the_size_first(tmp_path, target):
    told = steps(target, tmp_path / "venv")
    assert "dev" not in told.replace("/dev/null", "")
    assert told.index("MB to download") < told.index("packaging/install_node.py")


def test_what_tests_installs_the_development_tools(tmp_path):
    assert "--editable '.[node,convert,dev]'" in steps("test", tmp_path / "venv")


@pytest.mark.parametrize("target", ["install", "demo"])
@pytest.mark.parametrize("line", ["exit 1", "kill -9 $$"])
def test_an_environment_whose_making_was_killed_is_made_anew(tmp_path, target, line):
    environment, made = tmp_path / "venv", tmp_path / "made"
    (environment / "bin").mkdir(parents=True)
    broken = environment / "bin" / "python"
    broken.write_text(f"#!/bin/sh\n{line}\n")
    # In place of Python: it notes that it was asked for an environment, and ends make there.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {made}\nexit 7\n')
    for path in (broken, python):
        path.chmod(0o755)
    done = subprocess.run(
        ["make", target, f"VENV={environment}", f"PYTHON={python}"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert made.read_text() == f"-m venv --clear {environment}\n"


def test_an_environment_for_tests_also_runs_the_demo_without_installing_again(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed-node", ".installed"):
        (tmp_path / name).touch()
    assert "install_node" not in steps("demo", tmp_path)
    assert "--editable" not in steps("test", tmp_path)


def test_a_new_wheel_leaves_the_debian_package_and_the_bundle_in_dist(tmp_path):
    build = [line for line in steps("dist", tmp_path).splitlines() if "dist" in line]
    dist = tmp_path / "dist"
    (dist / "npu-node-bundle").mkdir(parents=True)
    (dist / "npu-node_0.1.0-1~deb12_amd64.deb").touch()
    (dist / "npu_node-0.0.9-py3-none-any.whl").touch()
    (removal,) = [line for line in build if line.startswith("rm ")]
    subprocess.run(["sh", "-c", removal], cwd=tmp_path, check=True)
    assert sorted(path.name for path in dist.iterdir()) == ["npu-node-bundle", "npu-node_0.1.0-1~deb12_amd64.deb"]
    # twine knows neither: it is given what was built here.
    assert [line.split()[-1] for line in build if "twine" in line] == ["dist/npu_node-*"]
