"""The recipes of docs/other-tools.md as they stand, stock npm clients and Go, against a real node on real weights."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.foreign import environment, kept_directory, npm_packages, output_of
from tests.support.gateway import WAYS, reached

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
DOC = (HERE.parents[1] / "docs" / "other-tools.md").read_text(encoding="utf-8")
DOCUMENTED = "http://127.0.0.1:8081"


@pytest.fixture(scope="module", params=WAYS)
def node(request, whole_node):
    """What is asked here is answered in words, by the node itself and through the gateway."""
    with reached(whole_node, request.param) as node:
        yield node


def recipe(section, language, node):
    """The one block of that language in a section, for this node."""
    [text] = [part for part in DOC.split("\n## ") if part.startswith(section)]
    [block] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert DOCUMENTED in block
    return block.replace(DOCUMENTED, node.url)


def test_curl(node):
    if shutil.which("curl") is None:
        pytest.skip("NOT RUN: curl is not installed")
    told = output_of("sh", "-ec", recipe("curl", "sh", node))
    assert "data: [DONE]" in told
    assert '"object":"embedding"' in told
    assert '"done":true' in told


@pytest.mark.parametrize(
    ("section", "requirements", "lines"),
    [
        ("openai (Python)", None, ["Paris"]),
        ("ollama (", None, ["Paris"]),
        ("anthropic (", None, ["Paris"]),
        ("LangChain", "langchain", ["Paris", "Paris", "384", "384"]),
        ("LiteLLM", "litellm", ["Paris", "384"]),
    ],
)
def test_python(node, section, requirements, lines):
    # LiteLLM takes more than 5 s to import, and its environment minutes to install, once for each machine.
    python = sys.executable if requirements is None else environment(HERE / "environments" / f"{requirements}.txt")
    told = output_of(python, "-c", recipe(section, "python", node)).splitlines()
    for wanted, line in zip(lines, told, strict=False):
        assert wanted in line


@pytest.mark.parametrize("section", ["openai (npm)", "ollama ("])
def test_npm(node, section):
    packages = npm_packages(HERE / "npm" / "package.json")
    script = packages / "recipe.mjs"
    script.write_text(recipe(section, "js", node), encoding="utf-8")
    assert "Paris" in output_of("node", script, directory=packages)


def test_the_stock_npm_clients(node):
    packages = npm_packages(HERE / "npm" / "package.json")
    script = shutil.copy(HERE / "npm" / "stock_clients.mjs", packages)
    assert output_of("node", script, node.url, directory=packages).endswith("all as expected\n")


def test_go(node, tmp_path):
    # OpenAI's own SDK needs a newer Go than Debian 12 has, and a module proxy: net/http is what any machine can build.
    if shutil.which("go") is None:
        pytest.skip("NOT RUN: Go's client needs go, which this machine lacks")
    program = HERE / "golang" / "stock_client.go"
    built = kept_directory() / "go-build"
    told = output_of("go", "run", program, node.url, directory=tmp_path, GOCACHE=str(built), GO111MODULE="off")
    assert told.endswith("all as expected\n")
