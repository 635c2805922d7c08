"""Which models are kept away from a real NPU: known-bad families, and weights in forms that break it."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from worker_node.devices.npu import version_in
from worker_node.models.directory import MODEL_FILE, InstalledModel

# The graph says at its end how its weights were made.
_TAIL = 64 * 1024
_GROUPS = frozenset({"-1", "128"})
_GENERATING = frozenset({"generation", "vision"})


def problem_on_npu(installed: InstalledModel, architecture: str, driver: str | None = None) -> str | None:
    """Why the model is not for an NPU of this architecture with this driver, and the source; None if nothing is known.

    A row that names an architecture or a driver holds only where that is known.
    """
    family = _family(installed.path)
    for row in _known_bad():
        if row["family"] != family or row.get("architecture", architecture) != architecture:
            continue
        if "driver" not in row or (driver is not None and version_in(driver, row["driver"])):
            where = f"architecture {architecture}" + (f" with driver {driver}" if "driver" in row else "")
            return f"{family} on an NPU of {where}: {row['problem']} ({row['source']})"
    if installed.kind not in _GENERATING:
        return None
    return weights_problem(installed.quantization, *_compression(installed.path))


def weights_problem(mode: str, group: str | None, ratio: str | None) -> str | None:
    """Why an NPU does not take a generation model's weights, and what it takes; `group` and `ratio` None: unknown."""
    rules = (
        (mode.startswith("int8"), f"its weights are {mode}: the process dies while it generates (openvino#35641)"),
        (mode.startswith("int4_asym"), "its weights are int4_asym: an NPU takes symmetric ones"),
        (group not in {None, *_GROUPS}, f"the groups of its weights have {group} elements: an NPU takes 128 or -1"),
        (
            ratio is not None and float(ratio) != 1.0,
            f"only {ratio} of its weights are int4: an NPU takes a ratio of 1.0",
        ),
    )
    wrong = [problem for applies, problem in rules if applies and mode.startswith("int")]
    return f"{wrong[0]}; export it as int4_sym, groups of 128 or -1, ratio 1.0" if wrong else None


def _family(path: Path) -> str:
    try:
        return str(json.loads((path / "config.json").read_bytes()).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""


@cache
def _known_bad() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(
        files("worker_node.models").joinpath("known_bad.toml").read_text(encoding="utf-8")
    )["known_bad"]
    return rows


def _compression(path: Path) -> tuple[str | None, str | None]:
    """Group size and ratio of the compression that nncf notes; None each where it notes none."""
    try:
        with (path / MODEL_FILE).open("rb") as file:
            file.seek(max(0, (path / MODEL_FILE).stat().st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return None, None
    noted = text.partition("<weight_compression>")[2].partition("</weight_compression>")[0]
    group = re.search(r'<group_size value="(-?\d+)"', noted)
    ratio = re.search(r'<ratio value="(\d+(?:\.\d+)?)"', noted)
    return (group[1] if group else None), (ratio[1] if ratio else None)
