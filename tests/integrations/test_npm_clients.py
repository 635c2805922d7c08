"""The stock npm clients, openai and ollama, against a real node on real weights."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.foreign import npm_packages

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "npm"


def test_the_npm_clients(whole_node):
    packages = npm_packages(SCRIPTS / "package.json")
    script = shutil.copy(SCRIPTS / "stock_clients.mjs", packages)
    done = subprocess.run(
        ["node", script, whole_node.url], cwd=packages, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all is as it should be"
