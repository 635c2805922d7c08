"""The node's own files: the model and what was compiled of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from worker_node.devices.compile_cache import KEY_FILE, CacheKey
from worker_node.devices.probe import Probe
from worker_node.doctor.finding import Finding, error, ok, warning


def check_model(path: Path, problem: str | None) -> Finding:
    """`problem` is what keeps the model directory from being loaded, None if nothing does."""
    if problem is None:
        return ok("model-files", str(path))
    return error("model-files", problem, "npu-node pull qwen2.5-1.5b-instruct, or set OV_GENAI_NPU_MODEL")


def check_cache(root: Path, probe: Probe) -> list[Finding]:
    """Entries for the NPU that other versions wrote, and whether new ones can be."""
    found = _writable(root)
    stale = [path.parent for path in sorted(root.glob(f"*/*/{KEY_FILE}")) if _is_stale(path, probe)]
    if stale:
        names = " ".join(str(path) for path in stale)
        fix = f"rm -r {names} (the node does so when it next loads these models)"
        return [found, warning("cache-version", f"{len(stale)} compiled models are of other versions", fix)]
    return [found, ok("cache-version", "nothing compiled by other versions")]


def _writable(root: Path) -> Finding:
    existing = next(path for path in (root, *root.parents) if path.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return ok("cache-directory", str(root))
    fix = f"sudo chown -R $USER {existing}, or set OV_GENAI_NPU_CACHE"
    return error("cache-directory", f"{root} cannot be written: each start would compile again, for minutes", fix)


def _is_stale(path: Path, probe: Probe) -> bool:
    try:
        key = msgspec.json.decode(path.read_bytes(), type=CacheKey)
    except (OSError, msgspec.DecodeError):
        return False  # no entry of the node's
    if key.openvino != (probe.openvino or key.openvino):
        return True
    npu = probe.find("NPU")
    if key.device != "NPU" or npu is None:
        return False
    properties = npu.properties
    return (key.driver, key.compiler) != (
        properties.get("NPU_DRIVER_VERSION"),
        properties.get("NPU_COMPILER_VERSION"),
    )
