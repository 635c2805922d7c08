"""Writes docs/client/*.md, a page for each public module of the client, from its docstrings: `make docs`."""

import importlib
import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import is_typeddict

from pydantic import BaseModel

MODULES = ("", "sync", "cloud", "errors", "results", "options", "settings", "observability", "testing", "bulk")
# The docstring of a method that is described elsewhere.
SAME = r"See `([\w.]+)\.\w+`\."
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


def own_members(kind):
    """The members that no base class has: those have a part of their own, or are another package's."""
    return [member for member in members(kind) if not any(hasattr(base, member[0]) for base in kind.__mro__[1:])]


def signature(function):
    """The signature, without the addresses of default objects and the quotes of annotations."""
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"<\1>", str(inspect.signature(function)))
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def heading(name, function, *, is_property=False):
    if is_property:
        return f"`{name}`"
    word = "async " if inspect.iscoroutinefunction(function) else ""
    return f"`{word}{name}{signature(function)}`"


def _plain(annotation):
    """Without the modules that newer versions of Python keep a type in."""
    return annotation.replace("typing.", "").replace("pathlib._local.", "pathlib.")


def annotations(kind):
    """The fields of plain data that its base has not: name and type."""
    if is_dataclass(kind):
        inherited = {name for base in kind.__mro__[1:] for name in vars(base).get("__annotations__", {})}
        return [(field.name, field.type) for field in fields(kind) if field.name not in inherited]
    if issubclass(kind, BaseModel):
        return [
            (name, getattr(field.annotation, "__name__", None) or _plain(str(field.annotation)))
            for name, field in kind.model_fields.items()
            if not any(name in getattr(base, "model_fields", {}) for base in kind.__mro__[1:])
        ]
    if not is_typeddict(kind):
        return []
    inherited = {name for base in bases(kind) for name in base.__annotations__}
    return [(name, hint.__forward_arg__) for name, hint in kind.__annotations__.items() if name not in inherited]


def bases(kind):
    """The classes of this package that a class derives from."""
    if not is_typeddict(kind):  # which forgets its bases
        return [base for base in kind.__bases__ if base.__module__.startswith("backend_client")]
    others = filter(is_typeddict, vars(sys.modules[kind.__module__]).values())
    return [other for other in others if other.__annotations__.items() < kind.__annotations__.items()]


def described(name, value):
    """The part of a page about one name."""
    text = inspect.getdoc(value) or ""
    if inspect.isfunction(value):
        return [f"## {heading(name, value)}", text]
    lines = [f"## `{name}`", text]
    if not inspect.isclass(value):
        return lines
    above = [base for base in bases(value) if annotations(base) or own_members(base)]
    if above and not issubclass(value, Exception):
        lines.append(f"Has all of {' and '.join(f'`{base.__name__}`' for base in above)}.")
    data = annotations(value)
    if data:
        lines.append("\n".join(f"- `{field}`: `{kind}`" for field, kind in data))
    elif "__init__" in vars(value):
        lines.append(f"Made as `{name}{signature(value)}`.")
    same = [member for member in own_members(value) if re.fullmatch(SAME, inspect.getdoc(member[1]) or "")]
    if same:
        names = ", ".join(f"`{member[0]}`" for member in same)
        lines.append(f"As in `{re.fullmatch(SAME, inspect.getdoc(same[0][1]))[1]}`: {names}.")
    for member, function, is_property in own_members(value):
        if (member, function, is_property) in same:
            continue
        lines += [f"### {heading(member, function, is_property=is_property)}", inspect.getdoc(function) or ""]
    return lines


def home_of(value):
    """The module whose page has a class, of those that have a page."""
    return next(
        (name for name in MODULES if name and f"{value.__module__}.".startswith(f"backend_client.{name}.")), None
    )


def page(module_name):
    """The Markdown of a module: what it defines, and where the rest of its names is described."""
    module = importlib.import_module(f"backend_client.{module_name}".rstrip("."))
    lines = [f"# {module.__name__}", "Generated from the docstrings: run `make docs`.", inspect.getdoc(module) or ""]
    elsewhere, here = [], []
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value) and name != value.__name__:
            elsewhere.append(f"- `{name}` is `{value.__name__}`")
        elif inspect.isclass(value) and home_of(value) not in {None, module_name}:
            elsewhere.append(f"- `{name}`: [{value.__module__}]({home_of(value)}.md)")
        else:
            here.append((name, value))
    if elsewhere:
        lines.append("\n".join(elsewhere))
    # What classes of a page inherit from one that is not public is described once, on the first page that needs it.
    shared = {base for _, value in here if inspect.isclass(value) for base in value.__mro__ if base.__name__[0] != "_"}
    home = "backend_client.sync" if module_name == "sync" else "backend_client.calls"
    if module_name in {"", "sync"}:
        here += [(base.__name__, base) for base in shared - {value for _, value in here} if base.__module__ == home]
    for name, value in here:
        lines += described(name, value)
    return "\n\n".join(lines) + "\n"


def main():
    PAGES.mkdir(exist_ok=True)
    for name in MODULES:
        (PAGES / f"{name or 'backend_client'}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
