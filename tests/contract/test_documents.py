"""What the README and the documents show works: Python runs, commands and settings are accepted, links lead on."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from backend_client import ConfigurationError
from backend_client.cli.main import build_parser as client_parser
from backend_client.settings import ClientSettings
from backend_client.testing import FakeFleet
from worker_node.cli.main import build_parser as node_parser
from worker_node.settings.reading import check_variables, parse_settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
# Indented or fenced lines that call a command, in whatever way: environment, another user, a container.
COMMANDS = re.findall(
    r"^(?: {4}|\w)[^|`#\n]*\b(npu-node|npu-client) ([a-z][a-z-]* ?.*)$", "\n".join(PAGES.values()), re.MULTILINE
)
CALLS = sorted({(program, line) for program, line in COMMANDS if "…" not in line and ", " not in line.split("#")[0]})
NODE_TOML = ["install.md", "npu.md", "vision.md", "speech.md", "models.md"]
TOML = re.compile(r"```toml\n([^`]*)```|(^ {4}\[\[models\]\].*\n(?: {4}.*\n)*)", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "python-client.md", "vision.md"])
def test_the_first_python_of_a_page_runs_as_a_script(page, monkeypatch, capsys, tmp_path):
    block = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"an image")
    with FakeFleet() as fleet:
        monkeypatch.setenv("NPU_CLIENT_NODES", fleet.urls[0])
        exec(compile(block.replace("http://127.0.0.1:8081", fleet.urls[0]), page, "exec"), {})  # noqa: S102
    assert fleet.urls[0] in capsys.readouterr().out


@pytest.mark.parametrize(("program", "line"), CALLS)
def test_a_command_of_the_documents_is_accepted(program, line):
    parser = node_parser() if program == "npu-node" else client_parser()
    words = shlex.split(re.split(r" [<>|;&]+ ", line)[0], comments=True)
    parser.parse_args(words)


def test_every_variable_of_the_documents_sets_something(monkeypatch):
    names = set(re.findall(r"\bNPU_(?:NODE|CLIENT)_[A-Z_]+[A-Z]", "\n".join(PAGES.values()))) - {"NPU_NODE_PROT"}
    assert check_variables(dict.fromkeys(names, "")) == []
    for name in names:
        if name.startswith("NPU_CLIENT_") and name != "NPU_CLIENT_CONFIG":
            monkeypatch.setenv(name, "no value")
    # All are known, and only then are their values looked at.
    with pytest.raises(ConfigurationError, match="the settings are wrong"):
        ClientSettings.load()


@pytest.mark.parametrize("page", NODE_TOML)
def test_the_settings_of_a_page_are_accepted(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "api_keys").write_text("k" * 20)
    examples = [fenced or indented for fenced, indented in TOML.findall(PAGES[page])]
    assert examples
    for example in examples:
        parse_settings(example)


def test_the_knobs_of_the_tuning_page_are_settings():
    knobs = re.findall(r"^\| (`.*?) \|", PAGES["tuning.md"], re.MULTILINE)
    assert knobs
    settings = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    for knob in re.findall(r"`(\w+)`", "".join(knobs)):
        assert f"| `{knob}` |" in settings


@pytest.mark.parametrize("link", sorted(set(LINKS)))
def test_a_link_of_the_readme_leads_to_a_file(link):
    assert (ROOT / link).is_file()


FACTS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in PAGES["npu-facts.md"].splitlines()
    if re.match(r"\| \d+ \|", line)
]


@pytest.mark.parametrize("row", FACTS, ids=lambda row: "fact " + row[0].strip("| "))
def test_a_fact_names_where_the_node_answers_it_and_a_test_that_shows_it(row):
    _, reported, answer, shown = row
    assert reported
    if shown == "— |":
        assert re.search(r"\b(not|nothing)\b", answer), "why nothing can be shown"
        return
    places = re.findall(r"`([\w./-]+\.(?:py|toml|yaml))`", answer)
    assert places
    assert [name for name in places if not ((ROOT / "worker_node" / name).is_file() or (ROOT / name).is_file())] == []
    tests = re.findall(r"`(\w+\.py)`", shown)
    assert tests
    assert [name for name in tests if not list((ROOT / "tests").rglob(name))] == []


def test_the_runtime_is_newer_than_those_that_fail_with_whisper():
    """Fact 7: up to 2026.2.1, with models that transformers 4.43 and newer exported."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for package in ("openvino", "openvino-genai"):
        (version,) = {found[1] for words in required.values() for found in map(pinned(package).match, words) if found}
        assert tuple(map(int, version.split("."))) > (2026, 2, 1)


def pinned(package):
    return re.compile(package + r">=([\d.]+)")
