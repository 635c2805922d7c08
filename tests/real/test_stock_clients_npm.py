"""The stock npm clients, openai and ollama, against a real node on real weights."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "npm"
INSTALL_LIMIT_S = 110


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A directory with the clients installed, at the versions that package.json pins."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("NOT RUN: the npm clients need node and npm, which this machine lacks")
    directory = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "stock_clients.mjs"):
        shutil.copy(SCRIPTS / name, directory)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    try:
        subprocess.run(install, cwd=directory, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"NOT RUN: npm could not install the clients: {error.stderr or error}"[:500])
    return directory


def test_the_npm_clients(node, packages):
    done = subprocess.run(
        ["node", "stock_clients.mjs", node.url], cwd=packages, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all is as it should be"
