"""docs/architecture.md names files and packages that exist, and all packages of the node."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_exists():
    named = re.findall(r"`((?:worker_node|backend_client|tests)/[\w/.]+)`", PAGE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_twenty_questions_have_an_answer():
    section = PAGE.split("## Twenty questions")[1].split("## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) == 20
    assert all("`" in answer for _, answer in rows)
