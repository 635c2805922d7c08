"""The list of packages by which `make demo` installs in parts is what pip would find by itself."""

import importlib.util
import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(lines, extras, found):
    """Add the packages that the lines of a package name for these extras, and what they need."""
    for line in lines or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            continue
        key = (normalised(requirement.name), frozenset(requirement.extras))
        if key not in found:
            found.add(key)
            needed(requires(requirement.name), requirement.extras, found)
    return {package for package, _ in found}


def test_the_list_is_what_the_node_and_its_conversions_need():
    spec = importlib.util.spec_from_file_location("install_node", ROOT / "packaging" / "install_node.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = module.packages()
    # Not from the installed project's metadata: that is what it was when it was installed.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert sorted(listed) == sorted(
        needed([*project["dependencies"], *extras["node"], *extras["convert"]], set(), set())
    )
    pinned = {normalised(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(listed) <= pinned
