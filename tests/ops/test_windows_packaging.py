"""What is packaged for Windows, as far as it can be checked on Linux: PowerShell's grammar, and WinGet's manifests.

NOT RUN ON WINDOWS. The grammar is tree-sitter's: PowerShell itself is in no package index.
"""

import hashlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.ops.containers import run
from tests.support.foreign import environment

# What they run is fetched once and kept; an index may be slow.
pytestmark = pytest.mark.timeout(2400)

WINDOWS = Path(__file__).parents[2] / "packaging" / "windows"
ERRORS = """
import sys
import tree_sitter, tree_sitter_powershell
language = tree_sitter.Language(tree_sitter_powershell.language())
for path in sys.argv[1:]:
    root = tree_sitter.Parser(language).parse(open(path, "rb").read()).root_node
    nodes = [root]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.is_error or node.is_missing:
            print(f"{path}:{node.start_point[0] + 1}: {node.type}")
"""


@pytest.fixture(scope="module")
def python():
    """The Python of an environment with the grammar and with uv."""
    return environment(Path(__file__).with_name("windows.txt"))


def test_scripts_follow_the_grammar_and_say_that_they_were_not_run(python, tmp_path):
    scripts = sorted(WINDOWS.glob("*.ps1"))
    assert len(scripts) == 2
    assert run(python, "-c", ERRORS, *scripts).stdout == ""
    assert all("NOT RUN ON WINDOWS" in script.read_text() for script in scripts)
    broken = tmp_path / "broken.ps1"
    broken.write_text(scripts[0].read_text().replace("{", "", 1))
    assert run(python, "-c", ERRORS, broken).stdout


def test_every_dependency_of_a_node_has_a_wheel_for_windows(python):
    root = WINDOWS.parents[1]
    # pip trusts the authorities of the system, and so must uv, where an index is reached through a proxy of the house.
    target = ("--python-platform", "windows", "--only-binary", ":all:", "--extra", "node", "--extra", "convert")
    files = ("--constraint", root / "constraints.txt", "--no-header", root / "pyproject.toml")
    found = run(python.with_name("uv"), "pip", "compile", "--system-certs", *target, *files, timeout=900).stdout.split()
    assert any(requirement.startswith("openvino-genai==") for requirement in found)
    assert not any(requirement.startswith("uvloop==") for requirement in found)


def test_manifests_agree_with_each_other_and_with_the_archive(tmp_path):
    spec = importlib.util.spec_from_file_location("winget", WINDOWS / "winget.py")
    winget = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(winget)
    archive = tmp_path / "npu-client.zip"
    archive.write_bytes(b"an archive")
    files = winget.manifests("https://example.net/npu-client.zip", archive)
    kinds = {content["ManifestType"]: name for name, content in files.items()}
    assert set(kinds) == {"version", "installer", "defaultLocale"}
    assert len({(content["PackageIdentifier"], content["PackageVersion"]) for content in files.values()}) == 1
    installer = files[kinds["installer"]]["Installers"][0]
    assert installer["InstallerSha256"] == hashlib.sha256(b"an archive").hexdigest().upper()
    for name, content in files.items():
        assert name.startswith(content["PackageIdentifier"])
        assert re.fullmatch(r"[^.\s]{1,32}(\.[^.\s]{1,32}){1,7}", content["PackageIdentifier"])
        assert json.loads(json.dumps(content)) == content
