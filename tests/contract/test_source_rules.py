"""What holds for every source file: its size, its names, how it imports, and how it starts processes."""

import ast

from tests.support.source_tree import CLIENT_FILES, NODE_FILES, ROOT, import_statements, imports_of, reject


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


# Of the client and its tests, which were not split yet.
LONGEST = {"worker_node": 600, "backend_client": 350}


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
