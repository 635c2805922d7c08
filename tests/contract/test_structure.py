"""The rooms of the node's source and which may know of which: one direction of dependency, held by reading imports."""

import ast
import re

from tests.support.source_tree import NODE_FILES, ROOT, imports_of, reject
from worker_node import registry

# From the bottom up. A room may import itself, rooms in its set, and those that everything stands on.
EVERYWHERE = {"domain", "environment", "errors", "operating_system", "registry"}
MAY_IMPORT = {
    "domain": set(),
    "environment": set(),
    "errors": set(),
    "operating_system": set(),
    "registry": set(),
    "devices": set(),
    "models": {"devices"},
    "options": set(),
    "routing": set(),
    "tallies": set(),
    "telemetry": {"tallies"},
    "tracing": {"engines"},
    "notify": set(),
    "tls": set(),
    "scheduling": set(),
    "structured_output": set(),
    "preparation": {"models"},
    "dialogue": set(),
    "engines": set(),
    "encoders": {"engines", "devices", "options", "scheduling"},
    "tasks": {"encoders", "engines", "devices", "options", "scheduling"},
    "hosting": {"engines", "devices"},
    "settings": {"models", "options", "devices"},
    "manager": {"devices", "routing", "scheduling", "hosting", "engines", "models"},
    "failures": set(),
    "serving": {
        "encoders",
        "manager",
        "tracing",
        "routing",
        "tallies",
        "telemetry",
        "scheduling",
        "hosting",
        "engines",
        "models",
        "options",
        "devices",
        "settings",
    },
    "jobs": {"structured_output"},
    "doctor": {"devices"},
    "reload": {"manager", "models", "serving", "settings"},
    "node": {"reload", "manager", "serving", "failures", "telemetry", "devices", "settings"},
    # The bounded profile is one model that generates text: it stands on that task, and no other.
    "bounded": {"jobs", "tasks.serving", "serving", "manager", "hosting", "engines", "models", "devices", "settings"},
    "api": {
        "node",
        "bounded",
        "jobs",
        "serving",
        "manager",
        "tracing",
        "routing",
        "telemetry",
        "engines",
        "models",
        "devices",
        "settings",
    },
    "app": {"node", "api", "settings"},
    "server": {
        "node",
        "reload",
        "api",
        "telemetry",
        "tracing",
        "app",
        "devices",
        "manager",
        "models",
        "notify",
        "tls",
        "serving",
        "settings",
    },
    "sidecar": {"node", "server", "api", "bounded", "models"},
    "commands": {
        "sidecar",
        "doctor",
        "bounded",
        "jobs",
        "server",
        "settings",
        "models",
        "devices",
        "serving",
        "node",
        "manager",
    },
    "cli": {"commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
# What the version stands in is for everybody.
HTTP_ROOMS = {"api", "tasks.api", "app", "server", "sidecar"}
# A task is one package with parts in four layers. What an engine process runs stands below hosting; its `files`,
# `serving` and `api` (a file or a package each) stand just above the rooms of models, serving and HTTP. They are found
# by name, through the registration, so no room has to know of a task.
LAYERS_OF_TASKS = {"files": "models", "serving": "serving", "api": "api"}
for part, layer in LAYERS_OF_TASKS.items():
    MAY_IMPORT[f"tasks.{part}"] = MAY_IMPORT[layer] | {layer, "tasks"}
MAY_IMPORT["tasks.serving"] |= {"tasks.files", "dialogue", "structured_output", "preparation"}
MAY_IMPORT["tasks.api"] |= {"tasks.serving", "structured_output"}
# What every request goes through, whatever its task: a task is one more package, and no word in any of these.
TASK_FREE = {
    *("routing", "scheduling", "preparation", "engines", "encoders", "hosting", "manager", "serving"),
    *("node", "reload", "app", "server", "registry", "failures", "tallies", "telemetry", "tracing"),
}


def room_of(path):
    return room_of_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def room_of_module(module):
    """The room of a module: `tasks.api` for a task's part in that layer, else the first part of its name."""
    parts = module.split(".")[1:]
    if len(parts) > 2 and parts[0] == "tasks" and parts[2] in LAYERS_OF_TASKS:
        return f"tasks.{parts[2]}"
    return parts[0]


def test_a_room_imports_only_rooms_below_it():
    violations = []
    for path in NODE_FILES:
        room = room_of(path)
        if room not in MAY_IMPORT:
            violations.append(f"{path}: {room} is missing from MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[room] | EVERYWHERE | {room}
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "backend_client":
                violations.append(f"{path} imports {module}")
            other = room_of_module(module) if parts[0] == "worker_node" and len(parts) > 1 else None
            if other in MAY_IMPORT and other not in allowed:
                violations.append(f"{room} must not know of {other}: {path} imports {module}")
    reject(violations)


def words_of(name):
    """The words of a name in lower case: `embed_job`, `EmbedJob` and `tasks.embed` all say embed."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_in(path):
    """All identifiers in a file, the modules that it imports, and strings that could be a name; with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "asname", "module")]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            found.append(node.value)
        yield from ((getattr(node, "lineno", 1), name) for name in found if isinstance(name, str))


def test_what_every_request_goes_through_names_no_task():
    """By its package, its kind or its verb, of each task that is registered: in names of files, too."""
    tasks = {word for task in registry.tasks().values() for word in (task.kind, task.verb, task.serving.split(".")[2])}
    assert {"embed", "embedding", "generate", "generation", "rerank", "transcribe", "vision"} <= tasks
    paths = [path for path in NODE_FILES if room_of(path) in TASK_FREE]
    assert {room_of(path) for path in paths} == TASK_FREE
    reject(
        [
            f"{path}:{line} names a task: {name}"
            for path in paths
            for line, name in [(1, path.stem), *names_in(path)]
            if words_of(name) & tasks
        ]
    )


def test_only_the_edge_knows_http():
    paths = [path for path in NODE_FILES if room_of(path) not in HTTP_ROOMS]
    reject(
        [f"{path} imports {module}" for path in paths for module in imports_of(path) if module.startswith("aiohttp")]
    )
