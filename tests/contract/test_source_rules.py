"""Rules for source files that no linter knows. Layers and dependencies: .importlinter and deptry, `make check`."""

import ast
import re
from pathlib import Path

from backend_client import errors as client_errors
from worker_node import registry
from worker_node.core import errors as node_errors

ROOT = Path(__file__).parents[2]
NODE_FILES = sorted((ROOT / "worker_node").rglob("*.py"))

# What every request goes through, whatever its task. A task is one package: none of these names one.
SHARED = {
    *("devices", "engines", "encoders", "manager", "observability", "sandbox", "scheduling", "serving"),
    *("app", "node", "registry", "server"),
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reject(violations):
    """Fail with every violation, so that one run shows all that has to be fixed."""
    assert not violations, "\n".join(["", *violations])


def test_only_one_package_of_the_node_asks_the_operating_system_for_what_is_its_own():
    """Locks, limits, ties of processes and inherited descriptors: what another system does in another way."""
    modules = {"ctypes", "fcntl", "grp", "msvcrt", "pwd", "resource", "uvloop"}
    words = ("pass_fds", "prctl(", "sys.platform", "add_signal_handler", "AF_UNIX", "getuid(", "os.fork")
    violations = []
    for path in NODE_FILES:
        if path.parent.name == "operating_system":
            continue
        violations += [f"{path}: imports {name}" for name in modules.intersection(imports_of(path))]
        source = path.read_text(encoding="utf-8")
        violations += [f"{path}: {word}" for word in words if word in source]
    reject(violations)


STARTS = {"Popen", "run", "create_subprocess_exec", "call", "check_call", "check_output"}


def starts_process(node):
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in STARTS:
        return False
    module = node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return module == "subprocess" or node.func.attr == "create_subprocess_exec"


def test_every_child_process_gets_an_environment_that_was_chosen():
    reject(
        [
            f"{path}:{node.lineno} starts a process that inherits the node's secrets: give it an env"
            for path in NODE_FILES
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if starts_process(node) and "env" not in {keyword.arg for keyword in node.keywords}
        ]
    )


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


def test_shared_packages_name_no_task():
    """By its package, its kind or its verb, of each task that is registered: in names of files, too."""
    tasks = {word for task in registry.tasks().values() for word in (task.kind, task.verb, task.serving.split(".")[2])}
    assert {"embed", "embedding", "generate", "generation", "rerank", "transcribe", "vision"} <= tasks
    package_of = {path: path.relative_to(ROOT / "worker_node").parts[0].removesuffix(".py") for path in NODE_FILES}
    assert set(package_of.values()) >= SHARED
    reject(
        [
            f"{path}:{line} names a task: {name}"
            for path, package in package_of.items()
            if package in SHARED
            for line, name in [(1, path.stem), *names_in(path)]
            if words_of(name) & tasks
        ]
    )


# The project by its name alone, as pip takes it from an index: not a path, an option's value or part of a longer name.
BY_NAME = re.compile(
    r"""pip3? install\b[^\n#]*?[\s'"]npu[-_]node(?=[\s'"`\[=,.;)]|$)|npu[-_]node\[[a-z,]+\](?! @ file)"""
)
PUBLISHED = {".md", ".py", ".toml", ".txt", ".sh", ".ps1", ".yml", ".yaml", ".html", ".cfg", ""}
# The history says what was so; tests of packaging name the wheel that they have built.
NOT_ADVICE = {"CHANGELOG.md", "tests", "build", "dist", "site"}


def test_nothing_advises_to_install_the_project_by_its_name():
    """The name is free on every index: anyone could register a package under it."""
    assert BY_NAME.search("pip install 'npu-node[hub]'")
    assert BY_NAME.search("pip install --upgrade npu-node")
    assert not BY_NAME.search("pip install -c constraints.txt dist/npu_node-0.1.0-py3-none-any.whl")
    tops = [top for top in ROOT.iterdir() if top.name not in NOT_ADVICE and not top.name.startswith(".")]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
    reject(
        [
            f"{path}: {found[0]}"
            for path in sorted(files)
            if path.suffix in PUBLISHED and "__pycache__" not in path.parts
            for found in BY_NAME.finditer(path.read_text(encoding="utf-8"))
        ]
    )


def test_node_and_client_give_the_same_advice_on_a_missing_extra():
    """They must not import each other, so each has the text."""
    assert node_errors.INSTALL_EXTRA == client_errors.INSTALL_EXTRA


def closed_arguments(function):
    """The arguments that a function closes at its end."""
    arguments = {argument.arg for argument in function.args.args}
    for block in (node for node in ast.walk(function) if isinstance(node, ast.Try)):
        for node in (node for part in block.finalbody for node in ast.walk(part)):
            if isinstance(node, ast.Attribute) and node.attr == "aclose":
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                yield from {root.id} & arguments


def test_every_generator_of_the_client_that_closes_an_argument_is_started_when_it_is_made():
    """One that was never started skips its `finally`."""
    reject(
        [
            f"{path}:{node.lineno} {node.name} is not decorated with lifetime.owning"
            for path in sorted((ROOT / "backend_client").rglob("*.py"))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.AsyncFunctionDef)
            and any(isinstance(part, ast.Yield) for part in ast.walk(node))
            and any(closed_arguments(node))
            and "owning" not in {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
        ]
    )
