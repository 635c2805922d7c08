"""The scripts that install, remove and release: bats with a Python that installs nothing, and shellcheck."""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ops.containers import run
from tests.support.foreign import environment, npm_packages

# What they run is fetched once and kept; an index may be slow.
pytestmark = pytest.mark.timeout(2400)

HERE = Path(__file__).parent / "bats"
PACKAGING = Path(__file__).parents[2] / "packaging"


def test_the_install_scripts_pass_their_bats_tests():
    bats = npm_packages(HERE / "package.json") / "node_modules/bats/bin/bats"
    run(bats, HERE / "install.bats")


def test_shellcheck_has_nothing_to_say():
    shellcheck = environment(HERE / "shellcheck.txt").with_name("shellcheck")
    scripts = [path for path in PACKAGING.rglob("*") if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh")]
    assert len(scripts) >= 7
    run(shellcheck, *scripts, HERE / "python3")


def test_make_dist_builds_the_same_release_twice_with_its_checksums_and_an_sbom_of_all_that_a_node_needs(tmp_path):
    for name in ("first", "second"):
        run("make", "dist", "DEB=no", f"DIST={tmp_path / name}", cwd=PACKAGING.parent)
    checked = run("sha256sum", "--check", "--strict", tmp_path / "first" / "SHA256SUMS", cwd=tmp_path / "second").stdout
    files = {path.name for path in (tmp_path / "second").iterdir()} - {"SHA256SUMS"}
    assert files == {line.removesuffix(": OK") for line in checked.splitlines()}
    assert {name.rpartition(".")[2] for name in files} == {"whl", "gz", "txt", "Containerfile", "json"}
    sbom = json.loads(next((tmp_path / "second").glob("*.cdx.json")).read_text())
    packages = {canonicalize_name(component["name"]) for component in sbom["components"]}
    project = tomllib.loads((PACKAGING.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert packages >= {
        Requirement(line).name for line in (*project["dependencies"], *extras["node"], *extras["convert"])
    }
