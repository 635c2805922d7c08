"""The wheel and the sdist of `make dist` are complete, and work in an environment that has nothing else of ours."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.contract.environments import base_closure, linked_environment
from worker_node.core.operating_system import tethered

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# A package, an image, a file of a release; a tag of git; the chart and the changelog.
_NAMED = re.compile(
    r"(?:npu[-_]node(?:==|[-_:])|(?:sign|origin) v|^appVersion: .|^## )(\d+\.\d+\.\d+)"
    r"|^version: (\d+\.\d+\.\d+)(?=\nappVersion)",
    re.MULTILINE,
)
# Files that are no Python: the ones that a build forgets.
_DATA = (
    "backend_client/cli/dashboard.html",
    "backend_client/cli/playground.html",
    "backend_client/py.typed",
    "worker_node/models/catalog.toml",
    "worker_node/py.typed",
)


def test_every_file_that_names_the_version_names_that_of_the_project():
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    paths += [path for name in ("ansible", "config", "docs", "packaging") for path in (ROOT / name).rglob("*.*")]
    named = {
        str(path.relative_to(ROOT)): {"".join(groups) for groups in _NAMED.findall(path.read_text(encoding="utf-8"))}
        for path in paths
        if path.suffix in {".md", ".sh", ".yaml", ".yml"}
    }
    assert {name: versions for name, versions in named.items() if versions - {VERSION}} == {}
    role = "ansible/roles/npu_node/meta/argument_specs.yml"
    for name in ("CHANGELOG.md", "config/helm/npu-node/Chart.yaml", "docs/install.md", "docs/kubernetes.md", role):
        assert named[name], name


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-d", directory, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("*.whl"))


def test_the_wheel_holds_every_source_file_and_nothing_of_the_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = ("worker_node", "backend_client")
    sources = {str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name).rglob("*.py")}
    assert sources | set(_DATA) | {"npu_commands.py"} <= names
    assert {name.partition("/")[0] for name in names} <= {
        *packages,
        "npu_commands.py",
        f"npu_node-{VERSION}.data",
        f"npu_node-{VERSION}.dist-info",
    }


def test_the_sdist_holds_what_a_build_and_the_documentation_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    release = {"Makefile", "packaging/dist.sh", "packaging/deb/build.sh", "config/container/Containerfile"}
    assert {"pyproject.toml", "constraints.txt", "README.md", "docs/install.md", *release, *_DATA} <= names


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A clean environment with the base dependencies and the wheel, installed by pip; its `bin`."""
    home = linked_environment(tmp_path_factory.mktemp("clean"))
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python", "--disable-pip-version-check")
    done = run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    return home / "bin"


@pytest.mark.parametrize("command", ["npu-node", "npu-client", "npu-gateway"])
def test_the_installed_commands_say_their_version(installed, command):
    done = run(installed / command, "--version", cwd=installed)
    assert (done.returncode, done.stdout) == (0, f"{command} {VERSION}\n"), done.stderr


def test_the_pages_that_messages_name_are_installed_and_found(installed):
    code = "from worker_node.cli.output import documentation; print(documentation())"
    done = run(installed / "python", "-I", "-c", code, cwd=installed)
    assert done.stdout.strip() == str(installed.parent / "share/doc/npu-node"), done.stderr
    assert (installed.parent / "share/doc/npu-node/install.md").exists()


# What a service that installs only the base imports.
PROGRAM = """
import sys
import backend_client, backend_client.sync, backend_client.cli.main
from backend_client import CloudClient
for name in ("openvino", "openvino_genai", "msgspec", "orjson", "rich", "worker_node.app", "prometheus_client"):
    assert name not in sys.modules, name
print(len(backend_client.__all__))
"""


def test_the_client_imports_with_the_base_dependencies_alone(installed):
    done = run(installed / "python", "-I", "-W", "error", "-c", PROGRAM, cwd=installed)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert not [
        name for name in base_closure() if re.match(r"openvino|msgspec|orjson|tokenizers|rich|nncf|torch", name)
    ]


def test_a_node_command_on_the_base_install_names_the_extra_that_it_needs(installed):
    done = run(installed / "npu-node", "serve", cwd=installed)
    assert done.returncode == 1
    assert done.stderr == (
        "npu-node: msgspec is not installed: this environment has only the client; "
        "add the node with pip install '.[node,convert]' in the project's checkout\n"
    )


@pytest.mark.linux
def test_the_bundle_runs_the_commands_that_a_node_starts_with_its_own_program():
    program, *arguments = tethered(["echo", "started"])
    assert program == sys.executable
    done = subprocess.run([program, ROOT / "packaging/bundle/entry.py", *arguments], capture_output=True, check=False)
    assert done.stdout == b"started\n", done.stderr
