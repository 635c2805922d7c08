"""The rooms of the source and which may know of which: one direction of dependency, held by reading the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up. A room may import itself, rooms in its set, and the two that everything stands on.
EVERYWHERE = {"domain", "errors"}
MAY_IMPORT = {
    "domain": set(),
    "errors": set(),
    "devices": set(),
    "models": set(),
    "routing": set(),
    "telemetry": set(),
    "tracing": {"engines"},
    "notify": set(),
    "scheduling": set(),
    "grammars": set(),
    "dialogue": set(),
    "engines": {"devices"},
    "hosting": {"engines", "devices"},
    "settings": {"models", "devices"},
    "serving": {
        "tracing",
        "dialogue",
        "grammars",
        "routing",
        "telemetry",
        "scheduling",
        "hosting",
        "engines",
        "models",
        "devices",
        "settings",
    },
    "jobs": {"grammars"},
    "doctor": {"devices"},
    "bounded": {"jobs", "serving", "hosting", "engines", "models", "devices", "settings"},
    "api": {"bounded", "jobs", "grammars", "serving", "tracing", "routing", "engines", "models", "devices", "settings"},
    "app": {"api", "models", "serving", "settings"},
    "server": {"api", "telemetry", "tracing", "app", "devices", "hosting", "models", "notify", "serving", "settings"},
    "sidecar": {"server", "api", "bounded", "models"},
    "commands": {"sidecar", "doctor", "bounded", "jobs", "server", "settings", "models", "devices", "serving"},
    "cli": {"commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
# What the version stands in is for everybody.
HTTP_ROOMS = {"api", "app", "server", "sidecar"}


def imports_of(path):
    """The modules that a file imports, at its top or anywhere inside."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    return path.relative_to(ROOT / "worker_node").parts[0].removesuffix(".py")


NODE_FILES = sorted((ROOT / "worker_node").rglob("*.py"))
CLIENT_FILES = sorted((ROOT / "backend_client").rglob("*.py"))


def test_there_is_something_to_hold():
    assert len(NODE_FILES) > 30
    assert len(CLIENT_FILES) > 3


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path):
    room = room_of(path)
    allowed = MAY_IMPORT[room] | EVERYWHERE | {room}
    for module in imports_of(path):
        parts = module.split(".")
        assert parts[0] != "backend_client", f"{path} imports {module}"
        if parts[0] == "worker_node" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] in allowed, f"{room} must not know of {parts[1]}: {path} imports {module}"


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_edge_knows_http(path):
    if room_of(path) not in HTTP_ROOMS:
        assert not [module for module in imports_of(path) if module.startswith("aiohttp")]


@pytest.mark.parametrize("path", CLIENT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_client_knows_nothing_of_the_node(path):
    assert not [module for module in imports_of(path) if module.startswith("worker_node")]


@pytest.mark.parametrize("path", [*NODE_FILES, *CLIENT_FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 350, f"{path} has {lines} lines: more than one concept?"
