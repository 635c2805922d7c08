"""A service that installs only the base can use `backend_client`: shown in a clean environment of its own."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import backend_client, backend_client.sync, backend_client._cli.main
from backend_client import CloudClient
for name in ("openvino", "openvino_genai", "msgspec", "orjson", "rich", "worker_node.app", "prometheus_client"):
    assert name not in sys.modules, name
print(len(backend_client.__all__))
"""


def base_closure():
    """The base dependencies of the project and all that those need, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line) for line in project["dependencies"]]
    found = {}
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(name)
        todo += [Requirement(line) for line in found[name].requires or ()]
    return found


@pytest.fixture(scope="module")
def clean_environment(tmp_path_factory):
    """An environment with the base dependencies' own files, taken from the ones installed here, and nothing else.

    It is what `pip install .` makes, in a second and without a package index: the files of each distribution in the
    closure are linked from their records.
    """
    home = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)], check=True)
    site = next(home.glob("lib/python*/site-packages"))
    for distribution in base_closure().values():
        for file in distribution.files or ():
            source, target = Path(str(distribution.locate_file(file))), site / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    (site / "backend_client").symlink_to(ROOT / "backend_client")
    return home / "bin" / "python"


def test_it_imports_with_the_base_dependencies_alone(clean_environment):
    done = subprocess.run(
        [clean_environment, "-I", "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_its_command_runs_there(clean_environment):
    done = subprocess.run(
        [clean_environment, "-I", "-m", "backend_client", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "health" in done.stdout


def test_the_base_needs_nothing_of_the_nodes():
    names = set(base_closure())
    assert not {name for name in names if re.match(r"openvino|msgspec|orjson|tokenizers|rich|nncf|torch", name)}
