"""The scripts that install and remove: their behaviour (bats, with a Python that installs nothing) and shellcheck."""

from pathlib import Path

import pytest

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
