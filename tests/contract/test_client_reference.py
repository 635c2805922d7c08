"""The reference of the client is complete, and is what its docstrings say."""

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("client_reference", ROOT / "docs" / "client_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = generator()


def test_every_public_module_has_a_page():
    public = {"bulk", "cloud", "errors", "observability", "options", "results", "settings", "sync", "testing"}
    assert (
        public
        == set(REFERENCE.MODULES) - {""}
        == {path.stem for path in REFERENCE.PAGES.glob("*.md")} - {"backend_client"}
    )


@pytest.mark.parametrize("name", REFERENCE.MODULES)
def test_a_page_is_what_the_docstrings_say(name):
    stored = (REFERENCE.PAGES / f"{name or 'backend_client'}.md").read_text(encoding="utf-8")
    assert REFERENCE.page(name) == stored, "run make docs"


@pytest.mark.parametrize("name", REFERENCE.MODULES)
def test_every_public_name_and_method_is_described(name):
    module = importlib.import_module(f"backend_client.{name}".rstrip("."))
    for public in REFERENCE.public_names(module):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), public
        if inspect.isclass(value):
            assert all(inspect.getdoc(function) for _, function, _ in REFERENCE.members(value)), public
