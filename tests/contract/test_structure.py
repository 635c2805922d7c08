"""The rooms of the source and which may know of which: one direction of dependency, held by reading the imports."""

import ast
import functools
import re
from pathlib import Path

from worker_node import registry

ROOT = Path(__file__).parents[2]

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
    "telemetry": set(),
    "tracing": {"engines"},
    "notify": set(),
    "tls": set(),
    "scheduling": set(),
    "grammars": set(),
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
        "telemetry",
        "scheduling",
        "hosting",
        "engines",
        "models",
        "options",
        "devices",
        "settings",
    },
    "jobs": {"grammars"},
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
MAY_IMPORT["tasks.serving"] |= {"tasks.files", "dialogue", "grammars", "preparation"}
MAY_IMPORT["tasks.api"] |= {"tasks.serving", "grammars"}
# What every request goes through, whatever its task: a task is one more package, and no word in any of these.
TASK_FREE = {
    *("routing", "scheduling", "preparation", "engines", "encoders", "hosting", "manager", "serving"),
    *("node", "reload", "app", "server", "registry", "failures", "telemetry", "tracing"),
}


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


def room_of(path):
    return room_of_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def room_of_module(module):
    """The room of a module: `tasks.api` for a task's part in that layer, else the first part of its name."""
    parts = module.split(".")[1:]
    if len(parts) > 2 and parts[0] == "tasks" and parts[2] in LAYERS_OF_TASKS:
        return f"tasks.{parts[2]}"
    return parts[0]


NODE_FILES = sorted((ROOT / "worker_node").rglob("*.py"))
CLIENT_FILES = sorted((ROOT / "backend_client").rglob("*.py"))


def reject(violations):
    """Fail with every violation, so that one run shows all that has to be fixed."""
    assert not violations, "\n".join(["", *violations])


def test_there_is_something_to_hold():
    assert len(NODE_FILES) > 30
    assert len(CLIENT_FILES) > 3


def test_only_one_file_of_the_node_asks_the_operating_system_for_what_is_its_own():
    """Locks, limits, ties of processes and inherited descriptors: what another system does in another way."""
    modules = {"fcntl", "resource", "ctypes", "uvloop"}
    words = ("socketpair(", "pass_fds", "prctl(")
    violations = []
    for path in NODE_FILES:
        if path.name == "operating_system.py":
            continue
        violations += [f"{path}: imports {name}" for name in modules.intersection(imports_of(path))]
        source = path.read_text(encoding="utf-8")
        violations += [f"{path}: {word}" for word in words if word in source]
    reject(violations)


def test_imports_are_absolute():
    files = [*NODE_FILES, *CLIENT_FILES]
    reject(
        [f"{path}: relative import" for path in files for node in import_statements(path) if getattr(node, "level", 0)]
    )


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


def test_the_client_knows_nothing_of_the_node():
    reject(
        [
            f"{path} imports {module}"
            for path in CLIENT_FILES
            for module in imports_of(path)
            if module.startswith("worker_node")
        ]
    )


# From the bottom up. Public modules are those without an underscore; each may import what stands in its set.
CLIENT_MAY_IMPORT = {
    "results": set(),
    "options": set(),
    "errors": {"results"},
    "_resilience": {"errors", "options", "results"},
    "_protocol": {"_resilience", "errors", "options", "results"},
    "settings": {"_protocol", "_resilience", "errors", "options", "results"},
}
_BELOW = set(CLIENT_MAY_IMPORT)
CLIENT_MAY_IMPORT |= {
    "_fleet": _BELOW,
    "_cloud": _BELOW,
    "_routing": _BELOW | {"_fleet", "_cloud"},
    "_api": _BELOW | {"_fleet", "_cloud", "_routing"},
}
CLIENT_MAY_IMPORT |= {
    "cloud": set(CLIENT_MAY_IMPORT),
    "sync": set(CLIENT_MAY_IMPORT),
    "observability": set(CLIENT_MAY_IMPORT) | {"sync"},
    "__init__": set(CLIENT_MAY_IMPORT) | {"cloud"},
}
CLIENT_MAY_IMPORT |= {"bulk": set(CLIENT_MAY_IMPORT)}
CLIENT_MAY_IMPORT |= {"testing": set(CLIENT_MAY_IMPORT) - {"bulk"}}
CLIENT_MAY_IMPORT |= {"_cli": set(CLIENT_MAY_IMPORT), "__main__": {"_cli"}}


def client_layer_of(path):
    return path.relative_to(ROOT / "backend_client").parts[0].removesuffix(".py")


def client_imports(path):
    """The modules of the client that a file imports, by the files that define them."""
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "backend_client" and len(parts) > 1:
            yield parts


def test_the_clients_layers_import_only_layers_below_them():
    violations = []
    for path in CLIENT_FILES:
        layer = client_layer_of(path)
        if layer not in CLIENT_MAY_IMPORT:
            violations.append(f"{path}: {layer} is missing from CLIENT_MAY_IMPORT: is it public, or part of a layer?")
            continue
        allowed = CLIENT_MAY_IMPORT[layer] | {layer}
        violations += [
            f"{layer} must not import {parts[1]}: {path} imports {'.'.join(parts)}"
            for parts in client_imports(path)
            if parts[1] in CLIENT_MAY_IMPORT and parts[1] not in allowed
        ]
    reject(violations)


def test_no_modules_of_the_client_import_each_other_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CLIENT_FILES}
    imports = {
        name: {module for parts in client_imports(path) if (module := ".".join(parts)) in files}
        for name, path in files.items()
    }
    while ends := {name for name, imported in imports.items() if not imported - {name}}:
        imports = {name: imported - ends for name, imported in imports.items() if name not in ends}
    assert not imports, f"in circles, or importing one: {sorted(imports)}"


# Of the client and its tests, which were not split yet.
LONGEST = {"worker_node": 300, "backend_client": 350}


def test_files_stay_small():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*NODE_FILES, *CLIENT_FILES]}
    reject(
        [
            f"{path} has {lines} lines: more than one concept?"
            for path, lines in lengths.items()
            if lines > LONGEST[path.relative_to(ROOT).parts[0]]
        ]
    )


# Two things may have one name only where the one is the other's form for another kind of caller.
SAME_NAME = {
    "InferenceClient": "the asynchronous client, and the same without asyncio",
    "NPUClient": "the asynchronous client, and the same without asyncio",
}


def public_classes(files):
    """The files that define each public class at their top, by its name."""
    found = {}
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return found


def test_a_class_name_means_one_thing():
    classes = [public_classes(files) for files in (NODE_FILES, CLIENT_FILES)]
    reject(
        [
            f"{name} is defined in {' and '.join(paths)}: name each by what it is"
            for found in classes
            for name, paths in found.items()
            if len(paths) > 1 and name not in SAME_NAME
        ]
    )


STARTS = {"Popen", "run", "create_subprocess_exec", "call", "check_call", "check_output"}


def starts_process(node):
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in STARTS:
        return False
    module = node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return module == "subprocess" or node.func.attr == "create_subprocess_exec"


def test_test_files_outside_of_packages_have_names_of_their_own():
    """pytest imports them by their bare names: two of one name end the collection of the whole suite."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists())
    names = [path.name for path in files]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_child_process_gets_an_environment_that_was_chosen():
    reject(
        [
            f"{path}:{node.lineno} starts a process that inherits the node's secrets: give it an env"
            for path in NODE_FILES
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if starts_process(node) and "env" not in {keyword.arg for keyword in node.keywords}
        ]
    )
