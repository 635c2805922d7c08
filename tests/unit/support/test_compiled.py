"""What is compiled before the workers start is what pytest and Python read."""

import importlib.util

import pytest
from _pytest.assertion.rewrite import _read_pyc

from tests.support import compiled


@pytest.fixture(params=["test_example.py", "conftest.py", "example.py"])
def source(request, tmp_path):
    path = tmp_path / "tests" / request.param
    path.parent.mkdir()
    path.write_text("ONE = 1\n")
    return path


def test_the_bytecode_is_read_until_the_file_changes(source, request):
    assert compiled._is_missing(source)
    compiled._compile(source, request.config)
    assert not compiled._is_missing(source)
    bytecode = compiled.bytecode_of(source)
    if source.name == "example.py":
        assert bytecode == type(source)(importlib.util.cache_from_source(source))
    else:
        assert _read_pyc(source, bytecode) is not None
    source.write_text("ONE = 2\n")
    later = bytecode.stat().st_mtime + 10
    compiled.os.utime(source, (later, later))
    assert compiled._is_missing(source)
