"""What is known of models on real NPUs: which are kept away, and how long prompts may be."""

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
# Bytes that a parameter takes in a file, with its scales and with tables that are stored wider.
_BYTES = {"int4": 0.55, "nf4": 0.55, "int8": 1.05, "f16": 2.0}
# Models of 8.2 billion parameters run on NPUs.
_MOST_PARAMETERS = 9e9
_REMEDY = "export it as int4_sym, groups of 128 or -1, ratio 1.0, or as int8_sym"


def problem_on_npu(
    installed: InstalledModel,
    architecture: str,
    driver: str | None = None,
    openvino: str | None = None,
) -> str | None:
    """Why the model is not for such an NPU; None if nothing is known."""
    versions = {"driver": driver, "openvino": openvino}
    known = _known_problem(installed, architecture, versions)
    if known is not None or installed.kind not in _GENERATING:
        return known

    mode, noted = installed.quantization, noted_compression(installed.path / MODEL_FILE)
    problem = _weights_problem(mode, noted.get("group_size"), noted.get("ratio"))
    if mode == "nf4" and architecture.startswith("37"):
        problem = "its weights are nf4: NPUs take them from Lunar Lake (4000) on"
    return f"{problem}; {_REMEDY}" if problem else None


def _known_problem(
    installed: InstalledModel,
    architecture: str,
    versions: Mapping[str, str | None],
) -> str | None:
    config = peek_config(installed.path / "config.json")
    family = str(config.get("model_type", ""))

    for row in _rows("known_bad.toml", "known_bad"):
        if row["family"] != family:
            continue
        if row.get("architecture", architecture) != architecture:
            continue

        named = [name for name in versions if name in row]
        if not all(version_in(versions[name] or "", row[name]) for name in named):
            continue

        where = [f"architecture {architecture}"]
        where += [f"{name} {versions[name]}" for name in named]
        device = " with ".join(where)
        return f"{family} on an NPU of {device}: {row['problem']} ({row['source']})"

    return None


def doubts_on_npu(installed: InstalledModel) -> tuple[str, ...]:
    """What makes a model slow on an NPU, or may keep it from being compiled there."""
    if installed.kind not in _GENERATING:
        return ()

    mode = installed.quantization
    noted = noted_compression(installed.path / MODEL_FILE)
    slow = _slow_groups(mode, noted.get("group_size"))
    doubts = [] if slow is None else [slow]
    for form, bytes_each in _BYTES.items():
        parameters = installed.size / bytes_each
        if mode.startswith(form) and parameters > _MOST_PARAMETERS:
            doubts.append(
                f"it has about {parameters / 1e9:.0f} billion parameters: NPUs' compilers fail with more than 8 to 9, "
                "and the next placement serves then"
            )
    return tuple(doubts)


def devices_for(capabilities: Collection[str] | None, weights: str | None) -> list[str]:
    """The devices that take a model of these weights; the voice detector of speech models always runs on the CPU."""
    if capabilities and "voice-activity" in capabilities:
        return ["CPU"]
    generates = capabilities is None or not _GENERATING.isdisjoint(capabilities)
    refused = generates and weights is not None and _weights_problem(weights, None, None) is not None
    return ["CPU", "GPU", *([] if refused else ["NPU"])]


def _slow_groups(mode: str, group: str | None) -> str | None:
    """Why int4 weights are slow; `group` None: unknown."""
    if not mode.startswith("int4") or group is None or group in _GROUPS:
        return None

    return (
        f"its int4 weights are in groups of {group}: an NPU may be half as fast with them as with one scale a row "
        "(group size -1)"
    )


def _weights_problem(mode: str, group: str | None, ratio: str | None) -> str | None:
    """Why an NPU does not take a generation model's weights; `group` and `ratio` None: unknown."""
    if mode.startswith("int8_asym"):
        return f"its weights are {mode}: the process dies while it generates (openvino#35641)"

    if mode.startswith("int4_asym"):
        return "its weights are int4_asym: an NPU takes symmetric ones"

    if mode.startswith("int8") and group not in {None, "-1"}:
        return f"its int8 weights are in groups of {group}: an NPU takes one scale a row"

    if mode.startswith(("int4", "nf4")) and ratio not in {None, *_ALL}:
        return f"only {ratio} of its weights are in 4 bits: an NPU takes a ratio of 1.0"

    return None


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


def npu_verdict(
    source_format: SourceFormat, stored: Mapping[str, Any], *, generates: bool, converted: str = "int4_int8"
) -> Suitability:
    """Judge a model that is not here yet by `stored`, the `quantization_config` of its openvino_config.json.

    `converted` is the form that a GGUF file would get.
    """
    if not generates:
        return Suitability(True, ("an encoder: it runs in f16 with static shapes",))
    if source_format is SourceFormat.GGUF:
        return Suitability(True, (f"converted here to {converted}, symmetric",))
    bits, symmetric = stored.get("bits"), stored.get("sym")
    if bits is None:
        return Suitability(None, (f"nothing says how the weights are stored; {_ALTERNATIVE}",))
    noted = (stored.get("group_size"), stored.get("ratio"))
    group, ratio = (str(value) if isinstance(value, int | float) else None for value in noted)
    named = "nf4" in {stored.get("dtype"), stored.get("weight_format")}
    mode = "nf4" if named else f"int{bits}_{'sym' if symmetric else 'asym'}"
    # What serving refuses is not called suitable here.
    problem = _weights_problem(mode, group, ratio)
    if problem is not None:
        return Suitability(False, (f"{problem}; {_ALTERNATIVE}",))
    form = "nf4, from Lunar Lake on" if named else f"int{bits} symmetric"
    groups = "channel-wise" if group == "-1" else f"in groups of {group}"
    slow = _slow_groups(mode, group)
    return Suitability(True, (f"{form}, {groups}", *(() if slow is None else (f"{slow}; {_ALTERNATIVE}",))))
