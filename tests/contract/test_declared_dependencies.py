"""What the source imports is what pyproject.toml declares: nothing comes along by the grace of another package."""

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# The extras on which each package may draw, besides the base.
EXTRAS = {
    "backend_client": ("bulk", "dns", "observability", "parquet", "ray", "testing"),
    "worker_node": ("node", "convert", "hub", "speech", "tracing", "vision"),
}


def declared(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for x in EXTRAS[package] for line in project["optional-dependencies"][x]]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(package):
    """The top-level modules of others that a package imports, at the top of a file or inside."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            yield from (name.partition(".")[0] for name in names)


@pytest.mark.parametrize("package", EXTRAS)
def test_every_import_is_declared(package):
    providers = metadata.packages_distributions()
    own = {"backend_client", "worker_node", *sys.stdlib_module_names}
    undeclared = {
        module
        for module in set(imported(package)) - own
        # A module whose extra is not installed here must be declared by its own name.
        if not {canonicalize_name(name) for name in providers.get(module, [module])} & declared(package)
    }
    assert not undeclared
