"""Environments with the project's base dependencies and nothing else, made of what is installed here."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def base_closure():
    """The base dependencies of the project and all that those need, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line) for line in project["dependencies"]]
    found = {}
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(name)
        todo += [Requirement(line) for line in found[name].requires or ()]
    return found


def linked_environment(home):
    """An environment at `home` with the base dependencies' own files; returns `home`.

    It is what `pip install` makes of them, in a second and without a package index: the files of each distribution in
    the closure are linked from their records.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)], check=True)
    site = site_packages(home)
    for distribution in base_closure().values():
        for file in distribution.files or ():
            source, target = Path(str(distribution.locate_file(file))), site / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    return home


def site_packages(home):
    return next(home.glob("lib/python*/site-packages"))
