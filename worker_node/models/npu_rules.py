"""Which models are kept away from a real NPU, and which are slow there: by family, and by the form of weights."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from worker_node.devices.npu import version_in
from worker_node.models.catalog import SourceFormat
from worker_node.models.directory import MODEL_FILE, InstalledModel, noted_compression, peek_config

_GROUPS = frozenset({"-1", "128"})
_ALL = frozenset({"1", "1.0"})
# Kinds of models, and what the API says that they can do.
_GENERATING = frozenset({"generation", "vision", "chat"})


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
    return _weights_problem(installed.quantization, noted.get("ratio"))


def slowness_on_npu(installed: InstalledModel) -> str | None:
    """Why the model is slower on an NPU than it could be; None if nothing is known."""
    if installed.kind not in _GENERATING:
        return None
    return _slow_groups(noted_compression(installed.path / MODEL_FILE).get("group_size"))


def _slow_groups(group: str | None) -> str | None:
    """What Intel's compiler says of weights in small groups (docs/npu-compiled.md)."""
    if group in {None, *_GROUPS}:
        return None
    return (
        f"the groups of its weights have {group} elements: an NPU multiplies each by itself, and Intel's compiler "
        "predicts about half of the tokens per second of one scale a row; export it with group size -1 or 128"
    )


def devices_for(capabilities: Collection[str] | None, weights: str | None) -> list[str]:
    """The devices that take a model of these weights; the voice detector of speech models always runs on the CPU."""
    if capabilities and "voice-activity" in capabilities:
        return ["CPU"]
    generates = capabilities is None or not _GENERATING.isdisjoint(capabilities)
    refused = generates and weights is not None and _weights_problem(weights, None) is not None
    return ["CPU", "GPU", *([] if refused else ["NPU"])]


def _weights_problem(mode: str, ratio: str | None) -> str | None:
    """Why an NPU does not take a generation model's weights; `ratio` None: unknown.

    Intel's compiler takes all of these, int8_sym too: they are refused for what happened on devices.
    """
    rules = (
        (mode.startswith("int8"), f"its weights are {mode}: the process dies while it generates (openvino#35641)"),
        (mode.startswith("int4_asym"), "its weights are int4_asym: an NPU takes symmetric ones"),
        (ratio not in {None, *_ALL}, f"only {ratio} of its weights are int4: an NPU takes a ratio of 1.0"),
    )
    wrong = [problem for applies, problem in rules if applies and mode.startswith("int")]
    return f"{wrong[0]}; export it as int4_sym, groups of 128 or -1, ratio 1.0" if wrong else None


@cache
def _known_bad() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(
        files("worker_node.models").joinpath("known_bad.toml").read_text(encoding="utf-8")
    )["known_bad"]
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
    problem = _weights_problem(f"int{bits}_{'sym' if symmetric else 'asym'}", ratio)
    if problem is not None:
        return Suitability(False, (f"{problem}; {_ALTERNATIVE}",))
    form = f"int{bits} symmetric, {'channel-wise' if group == '-1' else f'in groups of {group}'}"
    slow = _slow_groups(group)
    return Suitability(True, (form,) if slow is None else (form, f"slow there: {slow}; {_ALTERNATIVE}"))
