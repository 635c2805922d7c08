"""The Python of the README runs, and its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from backend_client.testing import FakeFleet

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]


async def test_the_python_of_the_readme_runs(monkeypatch, capsys):
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with FakeFleet() as fleet:
        monkeypatch.setenv("NPU_CLIENT_NODES", fleet.urls[0])
        await eval(code, {})  # noqa: S307
    assert fleet.urls[0] in capsys.readouterr().out


@pytest.mark.parametrize("link", sorted(set(LINKS)))
def test_a_link_of_the_readme_leads_to_a_file(link):
    assert (ROOT / link).is_file()
