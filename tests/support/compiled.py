"""What every worker reads is made once, before the workers start: on a fresh clone each of them would do it.

The bytecode of the source, the rewritten assertions of the tests, and what Hypothesis keeps below .hypothesis/: the
constants of each source file, and tables of characters. A second run finds it all there.
"""

import compileall
import importlib.util
import multiprocessing
import os
import resource
import sys
import warnings
from pathlib import Path
from types import ModuleType

# Neither has a public name for doing this to a file that is not imported.
from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.constants_ast import constants_from_module

SOURCES = ("worker_node", "backend_client", "tests")
TABLES = ".hypothesis/unicode_data"


def compile_all(config) -> float:
    """Make what is not there; returns the CPU seconds that it took."""
    if sys.dont_write_bytecode:
        return 0.0
    files = [path for source in SOURCES for path in sorted((config.rootpath / source).rglob("*.py"))]
    works = [(_compile, path, config) for path in files if _is_missing(path)]
    if not (config.rootpath / TABLES).is_dir():
        works.insert(0, (_make_tables,))
    cores = len(os.sched_getaffinity(0))
    fork = multiprocessing.get_context("fork")  # this process has a single thread, and has imported all of it
    before = _cpu_of_children()
    processes = [fork.Process(target=_do, args=(works[index::cores],)) for index in range(min(cores, len(works)))]
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads that a library started
        for process in processes:
            process.start()
    for process in processes:
        process.join()
    return _cpu_of_children() - before


def bytecode_of(path: Path) -> Path:
    """Where pytest keeps the rewritten code of a test file, or Python the code of another."""
    if _is_rewritten(path):
        return get_cache_dir(path) / (path.stem + PYC_TAIL)
    return Path(importlib.util.cache_from_source(path))


def _is_rewritten(path):
    return path.name.startswith("test_") or path.name == "conftest.py"


def _is_missing(path):
    bytecode = bytecode_of(path)
    return not bytecode.exists() or bytecode.stat().st_mtime < path.stat().st_mtime


def _do(works):
    for work, *arguments in works:
        work(*arguments)


def _compile(path, config):
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    constants_from_module(module)
    if not _is_rewritten(path):
        compileall.compile_file(path, quiet=2)
        return
    bytecode = bytecode_of(path)
    bytecode.parent.mkdir(exist_ok=True)
    source_hash, code = _rewrite_test(path, config)
    _write_pyc(config.stash[assertstate_key], code, source_hash, bytecode)


@settings(max_examples=1, database=None)
@given(st.text())
def _make_tables(_):
    """Any text makes them, and Hypothesis keeps them in .hypothesis/."""


def _cpu_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
