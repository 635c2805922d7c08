"""A service that installs only the base can use `backend_client`: shown in a clean environment of its own."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.contract.environments import base_closure, linked_environment, site_packages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import backend_client, backend_client.sync, backend_client.cli.main
from backend_client import CloudClient
for name in ("openvino", "openvino_genai", "msgspec", "orjson", "rich", "worker_node.app", "prometheus_client"):
    assert name not in sys.modules, name
print(len(backend_client.__all__))
"""


@pytest.fixture(scope="module")
def clean_environment(tmp_path_factory):
    """The Python of an environment with the base dependencies and our client."""
    home = linked_environment(tmp_path_factory.mktemp("base"))
    (site_packages(home) / "backend_client").symlink_to(ROOT / "backend_client")
    return home / "bin" / "python"


def test_it_imports_with_the_base_dependencies_alone(clean_environment):
    done = subprocess.run(
        [clean_environment, "-I", "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_the_command_runs_in_the_base_installation(clean_environment):
    done = subprocess.run(
        [clean_environment, "-I", "-m", "backend_client", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "health" in done.stdout


def test_the_base_needs_nothing_of_the_nodes():
    names = set(base_closure())
    assert not {name for name in names if re.match(r"openvino|msgspec|orjson|tokenizers|rich|nncf|torch", name)}
