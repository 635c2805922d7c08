"""docs/architecture.md names files that exist, and all packages of the node in the order of their imports."""

import re

from tests.support.source_tree import NODE_FILES, ROOT, imports_of, reject

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


def package_of(module):
    """The package of the node, by its name in the list; None for parts of tasks that belong to other layers."""
    parts = module.split(".")
    if parts[0] != "worker_node" or len(parts) < 2:
        return None
    return None if parts[1] == "tasks" and len(parts) > 3 and parts[3] in {"files", "serving", "api"} else parts[1]


def test_packages_are_listed_in_the_order_of_their_imports():
    rows = [line.split("|")[1] for line in PAGE.split("## ")[0].splitlines() if line.startswith("| `worker_node/")]
    listed = [name for row in rows for name in re.findall(r"`(?:worker_node/)?(\w+)(?:/|\.py)`", row)]
    ranks = {name: rank for rank, name in enumerate(listed)}
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in NODE_FILES}
    packages = {path: package_of(module) for path, module in modules.items()}
    assert len(ranks) == len(listed)
    assert set(listed) == {*packages.values()} - {None, "__init__", "__main__"}
    reject(
        [
            f"{path} imports {module}, which is not listed before {package}"
            for path, package in packages.items()
            if package in ranks
            for module in imports_of(path)
            if ranks.get(package_of(module), -1) > ranks[package]
        ]
    )
