"""Writes docs/client/*.md, a page for each public module of the client, from its docstrings: `make docs`."""

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import is_typeddict

from pydantic import BaseModel

MODULES = ("", "sync", "cloud", "errors", "results", "options", "settings", "observability", "testing", "bulk")
PAGES = Path(__file__).parent / "client"


def public_names(module):
    """What `__all__` names, else what is defined there without an underscore."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    )


def members(kind):
    """The public methods and properties of a class, with those that it has from classes of this package."""
    for name, value in sorted(inspect.getmembers(kind)):
        # An asynchronous generator or a property says its signature otherwise; what other packages define is theirs.
        function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
        defined = getattr(function, "__module__", "") or ""
        if not name.startswith("_") and inspect.isfunction(function) and defined.startswith("backend_client"):
            yield name, function, isinstance(value, property)


def signature(function):
    """The signature, without the addresses of default objects."""
    return re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", str(inspect.signature(function)))


def heading(name, function, *, is_property=False):
    if is_property:
        return f"`{name}`"
    word = "async " if inspect.iscoroutinefunction(function) else ""
    return f"`{word}{name}{signature(function)}`"


def _plain(annotation):
    """Without the modules that newer versions of Python keep a type in."""
    return annotation.replace("typing.", "").replace("pathlib._local.", "pathlib.")


def annotations(kind):
    """The fields of plain data: name and type."""
    if is_dataclass(kind):
        return [(field.name, field.type) for field in fields(kind)]
    if issubclass(kind, BaseModel):
        return [
            (name, getattr(field.annotation, "__name__", None) or _plain(str(field.annotation)))
            for name, field in kind.model_fields.items()
        ]
    return [(name, hint.__forward_arg__) for name, hint in kind.__annotations__.items()] if is_typeddict(kind) else []


def described(name, value):
    """The part of a page about one name."""
    text = inspect.getdoc(value) or ""
    if inspect.isfunction(value):
        return [f"## {heading(name, value)}", text]
    lines = [f"## `{name}`", text]
    if not inspect.isclass(value):
        return lines
    data = annotations(value)
    if data:
        lines.append("\n".join(f"- `{field}`: `{kind}`" for field, kind in data))
    elif "__init__" in vars(value):
        lines.append(f"Made as `{name}{signature(value)}`.")
    for member, function, is_property in members(value):
        lines += [f"### {heading(member, function, is_property=is_property)}", inspect.getdoc(function) or ""]
    return lines


def page(module_name):
    """The Markdown of a module."""
    module = importlib.import_module(f"backend_client.{module_name}".rstrip("."))
    lines = [f"# {module.__name__}", "Generated from the docstrings: run `make docs`.", inspect.getdoc(module) or ""]
    for name in public_names(module):
        lines += described(name, getattr(module, name))
    return "\n\n".join(lines) + "\n"


def main():
    PAGES.mkdir(exist_ok=True)
    for name in MODULES:
        (PAGES / f"{name or 'backend_client'}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
