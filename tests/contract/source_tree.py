"""The source files of node and client, and what they import, for tests of the tree."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODE_FILES = sorted((ROOT / "worker_node").rglob("*.py"))
CLIENT_FILES = sorted((ROOT / "backend_client").rglob("*.py"))


@functools.cache
def import_statements(path):
    """The import statements of a file, at its top or anywhere inside."""
    statements = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports_of(path):
    """The modules that a file imports."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reject(violations):
    """Fail with every violation, so that one run shows all that has to be fixed."""
    assert not violations, "\n".join(["", *violations])
