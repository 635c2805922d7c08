"""What is known of models on real NPUs: which are kept away, and how long prompts may be."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from worker_node.devices.npu import version_in
from worker_node.models.catalog import SourceFormat
from worker_node.models.directory import MODEL_FILE, InstalledModel, noted_compression, peek_config

_GROUPS = frozenset({"-1", "128"})
_ALL = frozenset({"1", "1.0"})
_GENERATING = frozenset({"generation", "vision"})


def problem_on_npu(installed: InstalledModel, architecture: str, driver: str | None = None) -> str | None:
    """Why the model is not for an NPU of this architecture with this driver; None if nothing is known.

    A row that names an architecture or a driver holds only where that is known.
    """
    family = str(peek_config(installed.path / "config.json").get("model_type", ""))
    for row in _known_bad():
        if row["family"] != family or row.get("architecture", architecture) != architecture:
            continue
        if "driver" not in row or (driver is not None and version_in(driver, row["driver"])):
            where = f"architecture {architecture}" + (f" with driver {driver}" if "driver" in row else "")
            return f"{family} on an NPU of {where}: {row['problem']} ({row['source']})"
    if installed.kind not in _GENERATING:
        return None
    noted = noted_compression(installed.path / MODEL_FILE)
    return _weights_problem(installed.quantization, noted.get("group_size"), noted.get("ratio"))


def _weights_problem(mode: str, group: str | None, ratio: str | None) -> str | None:
    """Why an NPU does not take a generation model's weights; `group` and `ratio` None: unknown."""
    rules = (
        (mode.startswith("int8"), f"its weights are {mode}: the process dies while it generates (openvino#35641)"),
        (mode.startswith("int4_asym"), "its weights are int4_asym: an NPU takes symmetric ones"),
        (group not in {None, *_GROUPS}, f"the groups of its weights have {group} elements: an NPU takes 128 or -1"),
        (ratio not in {None, *_ALL}, f"only {ratio} of its weights are int4: an NPU takes a ratio of 1.0"),
    )
    wrong = [problem for applies, problem in rules if applies and mode.startswith("int")]
    return f"{wrong[0]}; export it as int4_sym, groups of 128 or -1, ratio 1.0" if wrong else None


# Above about 2,000 tokens NPUs have answered garbage without an error (openvino.genai#3255).
CAREFUL_PROMPT_TOKENS = 1800


def known_prompt_limit(installed: InstalledModel, architecture: str, openvino: str | None) -> tuple[int, str]:
    """Tokens of the longest prompt that an NPU of this architecture is known to answer, and who says so."""
    noted = noted_compression(installed.path / MODEL_FILE)
    group = noted.get("group_size", "unknown")
    best = CAREFUL_PROMPT_TOKENS, "openvino.genai#3255"
    for row in _rows("prompt_limits.toml", "prompt_limit"):
        fits = row["architecture"] == architecture and version_in(openvino or "", row["openvino"])
        if fits and installed.quantization == row["weights"] and group == row["groups"] and row["tokens"] > best[0]:
            best = row["tokens"], row["source"]
    return best


def _known_bad() -> list[dict[str, Any]]:
    return _rows("known_bad.toml", "known_bad")


@cache
def _rows(file: str, table: str) -> list[dict[str, Any]]:
    text = files("worker_node.models").joinpath(file).read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)[table]
    return rows


@dataclass(frozen=True, slots=True)
class Suitability:
    """`suitable` is None where nobody can tell before it is tried; `reasons` in words."""

    suitable: bool | None
    reasons: tuple[str, ...]


_ALTERNATIVE = "repositories that end in -int4-cw-ov are made for NPUs"


def npu_verdict(source_format: SourceFormat, stored: Mapping[str, Any], *, generates: bool) -> Suitability:
    """Judge a model that is not here yet by `stored`, the `quantization_config` of its openvino_config.json."""
    if not generates:
        return Suitability(True, ("an encoder: it runs in f16 with static shapes",))
    if source_format is SourceFormat.GGUF:
        return Suitability(True, ("converted here to int4 and int8, symmetric",))
    bits, symmetric = stored.get("bits"), stored.get("sym")
    if bits is None:
        return Suitability(None, (f"nothing says how the weights are stored; {_ALTERNATIVE}",))
    noted = (stored.get("group_size"), stored.get("ratio"))
    group, ratio = (str(value) if isinstance(value, int | float) else None for value in noted)
    # What serving refuses is not called suitable here.
    problem = _weights_problem(f"int{bits}_{'sym' if symmetric else 'asym'}", group, ratio)
    if problem is not None:
        return Suitability(False, (f"{problem}; {_ALTERNATIVE}",))
    return Suitability(True, (f"int{bits} symmetric, {'channel-wise' if group == '-1' else f'in groups of {group}'}",))
